import pytest
from train_command import PrefectServer, TrainCommand


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    yield server
    server.kill()


@pytest.fixture
def train(tmp_path, prefect_server):
    """Starts `echo2 train`; kills what is left of it after the test."""
    started = []

    def start(*arguments, name="run", environment=None, runs=tmp_path):
        command = TrainCommand(runs, environment or prefect_server.environment, *arguments, name=name, logs=tmp_path)
        started.append(command)
        return command

    yield start
    for command in started:
        command.kill()
        command.survivors()
