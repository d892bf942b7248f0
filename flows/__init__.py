"""Prefect flows of ECHO-2.

Nothing leaves this machine unless you say so: Prefect's telemetry is off by default, and its own server is used unless
PREFECT_API_URL names another. Prefect reads these settings when it is first imported, so they are made here.
"""

import os

PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    # A busy machine starts Prefect's server slowly.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    # One task run per learner step and stage: written in batches, they cost the server half as much.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    # How long the end of a run waits for a server that is away: some 15 s instead of a minute.
    "PREFECT_CLIENT_MAX_RETRIES": "3",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}

for _name, _value in PREFECT_DEFAULTS.items():
    os.environ.setdefault(_name, _value)
