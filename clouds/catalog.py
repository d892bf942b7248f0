"""What clouds offer, read from a SkyPilot catalog on disk.

Invariants: nothing is fetched; a row gives an offer on demand, a spot offer, both or none, as it has prices above 0; of rows
that describe the same offer the cheapest counts; what cannot be read is named with its file and line; rows that are cut off, or
do not say what is to be rented where, are left out, and how many is told once for each file.

A catalog is a folder with a file `CLOUD/vms.csv` for each cloud, as SkyPilot keeps them in `~/.sky/catalogs/v8`. Rows without
accelerators are none of ours. A price of 0 stands for one that is not known.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from echo2.capacity.offers import Offer
from echo2.capacity.roofline import known_gpus
from echo2.capacity.tables import counted
from echo2.errors import UserError

log = logging.getLogger(__name__)

MOST = {"Price": 1e5, "SpotPrice": 1e5, "AcceleratorCount": 1024.0}
"""USD per hour and accelerators of one machine above which a row is nonsense."""

NEEDED_COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region")

GPU_NAMES = {
    "A10G": "A10G",
    "A100": "A100-40GB SXM",
    "A100-80GB": "A100-80GB SXM",
    "A100-80GB-SXM": "A100-80GB SXM",
    "A6000": "RTX A6000",
    "RTXA6000": "RTX A6000",
    "B200": "B200",
    "H100": "H100 SXM",
    "H100-SXM": "H100 SXM",
    "H200": "H200 SXM",
    "H200-SXM": "H200 SXM",
    "L4": "L4",
    "L40S": "L40S",
    "RTX3090": "RTX 3090",
    "RTX4090": "RTX 4090",
    "RTX5090": "RTX 5090",
}
"""The catalog's names of accelerators, and those of `echo2/capacity/gpus.toml`."""


def read_catalog(folder: Path) -> list[Offer]:
    """All offers with accelerators, by name. Raises UserError where `folder` is no catalog, or has none."""
    files = catalog_files(folder)
    cheapest: dict[str, Offer] = {}
    for file in files:
        for offer in _read_cloud(file):
            known = cheapest.get(offer.name)
            if known is None or offer.price_usd_per_hour < known.price_usd_per_hour:
                cheapest[offer.name] = offer
    if not cheapest:
        raise UserError(
            f"catalog {folder} has no offer with an accelerator and a price in its {len(files)} files: fetch it anew"
        )
    return [cheapest[name] for name in sorted(cheapest)]


def catalog_files(folder: Path) -> list[Path]:
    """The file of each cloud. Raises UserError where `folder` is none, or has no such file."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(
            f"activation.catalog: {folder} is no folder: name one like ~/.sky/catalogs/v8, which SkyPilot fills when it runs"
        )
    files = sorted(folder.glob("*/vms.csv"))
    if not files:
        raise UserError(
            f"activation.catalog: {folder} has no CLOUD/vms.csv: name the folder of one version, like ~/.sky/catalogs/v8"
        )
    return files


def gpu_name(accelerator: str, details: str) -> str:
    """The name on file of a catalog's accelerator, whose GpuInfo is `details`; empty where there is none.

    >>> gpu_name("A100-80GB", "{'Gpus': [{'Name': 'A100 PCIe', …"), gpu_name("H100", ""), gpu_name("V100", "")
    ('A100-80GB PCIe', 'H100 SXM', '')
    """
    name = GPU_NAMES.get(accelerator, "")
    if "pcie" in details.lower():
        name = name.replace(" SXM", " PCIe")
    return name if name in known_gpus() else ""


def _read_cloud(file: Path) -> Iterator[Offer]:
    try:
        # Spreadsheets put a mark of the byte order first.
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.DictReader(lines)
            missing = [column for column in NEEDED_COLUMNS if column not in (rows.fieldnames or ())]
            if missing:
                raise UserError(f"{file} has no column {', '.join(missing)}: it is no vms.csv of a SkyPilot catalog")
            left_out: list[int] = []
            for row in rows:
                accelerated, whole = row["AcceleratorName"], None not in row.values()
                if not whole or (accelerated and not (row["InstanceType"] and row["Region"])):
                    left_out.append(rows.line_num)
                elif accelerated:
                    yield from _read_row(row, file, rows.line_num)
            if left_out:
                rows_text = f"{counted(len(left_out), 'row')} of {file}, the first in line {left_out[0]}"
                log.warning("%s: cut off, or without InstanceType or Region, and left out: fetch the catalog anew", rows_text)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file} is no CSV file in UTF-8 ({error}): fetch it anew") from None


def _read_row(row: Mapping[str, str | None], file: Path, line: int) -> Iterator[Offer]:
    for spot, column in ((False, "Price"), (True, "SpotPrice")):
        price = _number(row, column, file, line)
        if price > 0:
            yield Offer(
                cloud=file.parent.name,
                price_usd_per_hour=price,
                region=row["Region"] or "",
                zone=row.get("AvailabilityZone") or "",
                instance_type=row["InstanceType"] or "",
                accelerator=row["AcceleratorName"] or "",
                accelerators=_number(row, "AcceleratorCount", file, line),
                gpu=gpu_name(row["AcceleratorName"] or "", row.get("GpuInfo") or ""),
                spot=spot,
            )


def _number(row: Mapping[str, str | None], column: str, file: Path, line: int) -> float:
    """0 where the row has none."""
    text = row.get(column) or "0"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST[column]:
        raise UserError(
            f"{file}, line {line}: {column} = {text!r} is not a number from 0 to {MOST[column]:g}: mend or fetch the catalog"
        )
    return value
