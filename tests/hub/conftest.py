import pytest
from test_ledger import Clock

from echo2.hub.database import Database
from echo2.hub.roster import Roster


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def roster(tmp_path, clock):
    database = Database(tmp_path / "ledger.db", "run-1")
    yield Roster(database, clock)
    database.close()
