"""Reading a SkyPilot catalog: the one in the repository, and broken ones."""

import doctest
from pathlib import Path

import pytest

from clouds import catalog
from clouds.catalog import read_catalog
from echo2.capacity.roofline import known_gpus
from echo2.errors import UserError

SHIPPED = Path(__file__).parent.parent.parent / "examples/catalog/v8"
HEADER = "InstanceType,AcceleratorName,AcceleratorCount,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\n"


@pytest.fixture
def written(tmp_path):
    """Writes catalogs with one cloud, `here`."""

    def write(text, encoding="utf-8"):
        folder = tmp_path / "catalog"
        (folder / "here").mkdir(parents=True, exist_ok=True)
        (folder / "here/vms.csv").write_bytes(text.encode(encoding))
        return folder

    return write


def test_doctests_hold():
    found = doctest.testmod(catalog)
    assert found.attempted and not found.failed


def test_the_shipped_catalog_has_offers_of_five_clouds_with_prices():
    offers = read_catalog(SHIPPED)
    assert {offer.cloud for offer in offers} == {"aws", "lambda", "nebius", "runpod", "vast"}
    assert len({offer.name for offer in offers}) == len(offers) == 113
    assert all(offer.price_usd_per_hour > 0 and offer.accelerators >= 1 for offer in offers)
    spot = next(offer for offer in offers if offer.name == "aws/ap-south-1/aps1-az2/p5.4xlarge/spot")
    assert (spot.price_usd_per_hour, spot.accelerator, spot.accelerators, spot.gpu) == (2.4701, "H100", 1, "H100 SXM")
    assert {offer.accelerator for offer in offers if not offer.gpu} == {"V100"}


def test_a_price_of_0_is_unknown_and_rows_without_accelerators_are_left_out(written):
    folder = written(HEADER + "m,L4,1,,0.5,0.00,r,z\nm,L4,1,,,0.2,s,z\ncpu,,,,0.1,0.05,r,z\n")
    assert [(o.name, o.price_usd_per_hour) for o in read_catalog(folder)] == [("here/r/z/m", 0.5), ("here/s/z/m/spot", 0.2)]


def test_of_rows_for_one_offer_the_cheapest_counts(written):
    (offer,) = read_catalog(written(HEADER + "m,L4,1,,0.5,,r,z\nm,L4,1,,0.4,,r,z\nm,L4,1,,0.6,,r,z\n"))
    assert offer.price_usd_per_hour == 0.4


def test_rows_that_are_cut_off_or_name_no_machine_or_region_are_left_out_and_told_once(written, caplog):
    good, cut, nameless, nowhere = "m,L4,1,,0.5,,r,z\n", "m,L4,1,,0.4", ",L4,1,,0.1,,r,z\n", "m,L4,1,,0.1,,,z\n"
    offers = read_catalog(written(HEADER + good + nameless + nowhere + cut))
    assert [(offer.name, offer.price_usd_per_hour) for offer in offers] == [("here/r/z/m", 0.5)]
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("3 rows of ") and "the first in line 3" in told


def test_a_byte_order_mark_is_no_part_of_the_first_column(written):
    (offer,) = read_catalog(written(HEADER + "m,L4,1,,0.5,,r,z\n", encoding="utf-8-sig"))
    assert offer.instance_type == "m"


@pytest.mark.parametrize(
    ("row", "words"),
    [("m,L4,1e12,,0.5,,r,z", "AcceleratorCount = '1e12'"), ("m,L4,1,,1e300,,r,z", "Price = '1e300'")],
)
def test_figures_that_no_machine_has_are_refused(written, row, words):
    with pytest.raises(UserError, match="line 2: " + words):
        read_catalog(written(HEADER + row + "\n"))


def test_columns_may_be_missing_and_in_any_order(written):
    (offer,) = read_catalog(written("Region,Price,AcceleratorCount,AcceleratorName,InstanceType\nr,1.5,8.0,H100,m\n"))
    assert (offer.name, offer.zone, offer.accelerators, offer.spot) == ("here/r/m", "", 8.0, False)


def test_accelerators_on_a_slower_board_are_not_taken_for_the_faster_one(written):
    rows = "a,A100-80GB,1,{'Name': 'A100 PCIe'},1,,r,\nb,A100-80GB,1,,1,,r,\nc,H100,1,{'Name': 'H100 PCIe'},1,,r,\n"
    gpus = {offer.instance_type: offer.gpu for offer in read_catalog(written(HEADER + rows))}
    assert gpus == {"a": "A100-80GB PCIe", "b": "A100-80GB SXM", "c": ""}, "an H100 on PCIe is not on file"
    assert set(catalog.GPU_NAMES.values()) <= set(known_gpus())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (HEADER + "m,L4,1,,cheap,,r,z\n", ("vms.csv, line 2", "Price = 'cheap'")),
        (HEADER + "m,L4,1,,1,,r,z\nm,L4,1,,1,-2,r,z\n", ("line 3", "SpotPrice = '-2'")),
        (HEADER + "m,L4,nan,,1,,r,z\n", ("AcceleratorCount = 'nan'",)),
        ("InstanceType,Price\nm,1\n", ("no column AcceleratorName, AcceleratorCount, Region",)),
        (HEADER + "cpu,,,,0.1,0.05,r,z\n", ("no offer with an accelerator",)),
        ("", ("no column InstanceType",)),
    ],
    ids=["text", "negative", "nan", "columns", "no accelerators", "empty"],
)
def test_a_catalog_that_cannot_be_used_is_refused_with_what_is_wrong(written, text, parts):
    with pytest.raises(UserError) as raised:
        read_catalog(written(text))
    assert [part for part in parts if part not in str(raised.value)] == [], raised.value


def test_a_file_that_is_no_text_a_folder_without_clouds_and_no_folder_are_refused(written, tmp_path):
    with pytest.raises(UserError, match="no CSV file in UTF-8"):
        read_catalog(written(HEADER + "é\n", encoding="latin-1"))
    with pytest.raises(UserError, match=r"has no CLOUD/vms\.csv"):
        read_catalog(tmp_path)
    with pytest.raises(UserError, match=r"none is no folder.*~/\.sky/catalogs/v8"):
        read_catalog(tmp_path / "none")
