"""The S3-compatible buckets that a run keeps copies of its snapshots in, and its checkpoints.

Invariants: boto3 is imported where a bucket is opened and nowhere else; credentials come from boto3's own chain, never from the
run; whatever goes wrong is an `ObjectStoreError` of one sentence, which says whether another try may go better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from echo2.config_sections import DisseminationSection
from echo2.errors import UserError

if TYPE_CHECKING:
    from boto3.s3.transfer import TransferConfig

CONNECT_S = 5.0
READ_S = 10.0
TRIES = 3
PART_BYTES = 8 * 1024 * 1024
MOST_PARTS = 10_000
MOST_READ_BYTES = 64 * 1024 * 1024
REFUSED_CREDENTIALS = (401, 403)


class ObjectStoreError(UserError):
    """A bucket that cannot be used as asked; `passing` where another try may go better."""

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


class Readable(Protocol):
    """What an upload takes its bytes from."""

    def read(self, amount: int = -1) -> bytes:
        """The next `amount` bytes, fewer only at the end."""


class Bucket:
    """One bucket, under a prefix; may be used by several threads."""

    def __init__(
        self, settings: DisseminationSection, location: str | None = None, setting: str = "dissemination.object_store"
    ) -> None:
        """The bucket at `location`, as the user wrote in `setting`, or else the one of `settings`. Sends nothing.

        Raises UserError where boto3 is missing or its own settings are wrong.
        """
        self.location = settings.object_store if location is None else location
        self.concurrency = settings.object_store_concurrency
        self._name, _, prefix = self.location.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._subject = f"{setting} = {self.location!r} at {settings.object_store_endpoint_url or 'AWS'}"
        self._bytes_per_s = int(settings.uplink_bytes_per_s) or None
        try:
            import boto3
            from botocore.config import Config
        except ModuleNotFoundError:
            raise UserError(
                f"{setting} = {self.location!r} needs boto3, which is not installed here: pip install 'echo2[store]'"
            ) from None
        # Checksums beyond what the protocol asks for are unknown to many servers that speak it; chunks have digests already.
        options = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": TRIES, "mode": "standard"},
            max_pool_connections=self.concurrency + 2,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        with self._explained():
            self._session = boto3.session.Session()
            self._client = self._session.client("s3", endpoint_url=settings.object_store_endpoint_url or None, config=options)

    def require_credentials(self) -> None:
        """Raises ObjectStoreError where boto3 finds none; no bucket is asked, but a cloud's metadata service may be."""
        from botocore.exceptions import NoCredentialsError

        with self._explained():
            if self._session.get_credentials() is None:
                raise NoCredentialsError

    def upload(self, key: str, content: Readable, total_bytes: int, metadata: Mapping[str, str]) -> None:
        """Put an object in place of a former one, in parts that travel side by side; it is there whole or not at all."""
        transfer = self._transfer(max(PART_BYTES, -(-total_bytes // MOST_PARTS)))
        with self._explained():
            self._client.upload_fileobj(
                content, self._name, self._prefix + key, ExtraArgs={"Metadata": dict(metadata)}, Config=transfer
            )

    def download(self, key: str, file: Path) -> None:
        """Write an object into a new file, from ranges that travel side by side."""
        with file.open("wb") as stream, self._explained():
            self._client.download_fileobj(self._name, self._prefix + key, stream, Config=self._transfer(PART_BYTES))

    @contextmanager
    def opened(self, key: str, start: int, length: int) -> Iterator[tuple[Mapping[str, str], BinaryIO]]:
        """The metadata of an object and `length` of its bytes from `start` on, to be read within the block."""
        wanted = f"bytes={start}-{start + length - 1}"
        with self._explained():
            answer = self._client.get_object(Bucket=self._name, Key=self._prefix + key, Range=wanted)
            with closing(answer["Body"]) as body:
                yield answer["Metadata"], body

    def read(self, key: str) -> bytes:
        """A small object, no more of it than `MOST_READ_BYTES`."""
        with self.opened(key, 0, MOST_READ_BYTES) as (_, body):
            return body.read()

    def keys(self, folder: str) -> list[str]:
        """Every key that begins with `folder`, without the prefix."""
        with self._explained():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=self._prefix + folder)
            return [found["Key"].removeprefix(self._prefix) for page in pages for found in page.get("Contents", ())]

    def delete(self, key: str) -> None:
        with self._explained():
            self._client.delete_object(Bucket=self._name, Key=self._prefix + key)

    def abort_uploads(self, folder: str) -> None:
        """Forget the parts of uploads below `folder` that were never finished, which are paid for until then."""
        with self._explained():
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._name, Prefix=self._prefix + folder
            )
            for unfinished in [found for page in pages for found in page.get("Uploads", ())]:
                self._client.abort_multipart_upload(Bucket=self._name, Key=unfinished["Key"], UploadId=unfinished["UploadId"])

    def _transfer(self, part_bytes: int) -> TransferConfig:
        from boto3.s3.transfer import TransferConfig

        return TransferConfig(
            multipart_threshold=part_bytes,
            multipart_chunksize=part_bytes,
            max_concurrency=self.concurrency,
            max_bandwidth=self._bytes_per_s,
            preferred_transfer_client="classic",
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever boto3 raises becomes an ObjectStoreError."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            raise self._refusal(error.response) from None
        except BotoCoreError as error:
            raise self._trouble(error) from None

    def _refusal(self, answer: Mapping[str, Mapping[str, object]]) -> ObjectStoreError:
        """What a server's refusal means."""
        code = str(answer.get("Error", {}).get("Code", "unknown"))
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        subject = self._subject
        if code == "NoSuchBucket":
            return ObjectStoreError(f"{subject}: there is no bucket {self._name!r}; create it, or change the setting")
        if code in ("NoSuchKey", "404"):
            return ObjectStoreError(f"{subject} no longer holds what was put there")
        if code == "InvalidRange":
            return ObjectStoreError(f"{subject} holds less than was put there")
        if status in REFUSED_CREDENTIALS:
            return ObjectStoreError(
                f"{subject} refuses this machine's credentials ({code}): check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                f"the profile, and what they may do with the bucket"
            )
        message = answer.get("Error", {}).get("Message", "without a reason")
        passing = isinstance(status, int) and (status >= 500 or status == 429)
        return ObjectStoreError(f"{subject} refuses a request ({code}: {message}): check the setting", passing)

    def _trouble(self, error: Exception) -> ObjectStoreError:
        """What it means that no answer came, or that no request went."""
        from botocore import exceptions

        subject = self._subject
        if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
            return ObjectStoreError(
                f"{subject}: this machine has no credentials for it; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                f"or a profile"
            )
        if isinstance(error, exceptions.ConnectionError | exceptions.HTTPClientError | exceptions.IncompleteReadError):
            return ObjectStoreError(
                f"{subject} cannot be reached ({error}): check dissemination.object_store_endpoint_url and the network", True
            )
        return ObjectStoreError(f"{subject} cannot be used ({error}): check the settings of boto3 on this machine")
