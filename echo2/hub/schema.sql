CREATE TABLE IF NOT EXISTS run (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS workers (
    worker_id        TEXT PRIMARY KEY,
    name             TEXT NOT NULL,
    state            TEXT NOT NULL CHECK (state IN ('live', 'left', 'lost')),
    registered_at_s  REAL NOT NULL,
    last_seen_at_s   REAL NOT NULL,
    telemetry        TEXT NOT NULL
) STRICT;

-- Which process a worker is, by a number that it has drawn.
CREATE TABLE IF NOT EXISTS processes (
    worker_id        TEXT PRIMARY KEY,
    process          TEXT NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS groups (
    group_id         INTEGER PRIMARY KEY,
    state            TEXT NOT NULL CHECK (state IN
                         ('leased', 'generated', 'ready', 'trained', 'filtered', 'expired', 'failed', 'evaluated')),
    attempt          INTEGER NOT NULL,
    worker_id        TEXT,                  -- NULL: its lease is open, the next worker takes it
    lease_version    INTEGER NOT NULL,
    deadline_s       REAL,
    failed_members   TEXT NOT NULL DEFAULT '[]',
    oldest_version   INTEGER,
    tokens           INTEGER NOT NULL DEFAULT 0,
    step             INTEGER,               -- the step that it was assigned to or, if filtered, counted for
    reason           TEXT,
    scores           TEXT,                  -- means over the group's members
    leased_at_s      REAL NOT NULL,
    scored_at_s      REAL,
    evaluation       INTEGER                -- the version that it evaluates; NULL: it is to be trained
) STRICT;
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state) WHERE state IN ('leased', 'generated', 'ready');
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step);
CREATE INDEX IF NOT EXISTS groups_by_evaluation ON groups (evaluation) WHERE evaluation IS NOT NULL;
CREATE INDEX IF NOT EXISTS groups_by_score_time ON groups (scored_at_s);
CREATE INDEX IF NOT EXISTS filtered_unassigned ON groups (state) WHERE state = 'filtered' AND step IS NULL;

CREATE TABLE IF NOT EXISTS attempts (
    group_id         INTEGER NOT NULL,
    attempt          INTEGER NOT NULL,
    worker_id        TEXT NOT NULL,
    outcome          TEXT NOT NULL CHECK (outcome IN
                         ('out', 'posted', 'part', 'returned', 'timeout', 'lost', 'engine_failed', 'late', 'stale')),
    tokens           INTEGER NOT NULL DEFAULT 0,   -- handed in and kept
    wasted_tokens    INTEGER NOT NULL DEFAULT 0,   -- handed in when others had done it, or it was too late
    leased_at_s      REAL NOT NULL,
    ended_at_s       REAL,
    PRIMARY KEY (group_id, attempt)
) STRICT;
CREATE INDEX IF NOT EXISTS attempts_by_worker ON attempts (worker_id, outcome, tokens);
CREATE INDEX IF NOT EXISTS attempts_by_outcome ON attempts (outcome, wasted_tokens);

CREATE TABLE IF NOT EXISTS rollouts (
    group_id         INTEGER NOT NULL,
    member           INTEGER NOT NULL,
    attempt          INTEGER NOT NULL,
    worker_id        TEXT NOT NULL,
    oldest_version   INTEGER NOT NULL,
    newest_version   INTEGER NOT NULL,
    tokens           INTEGER NOT NULL,
    reward           REAL,
    payload          BLOB,                  -- NULL once nobody can ask for it again
    PRIMARY KEY (group_id, member)
) STRICT;

-- What was handed in of members that are not finished.
CREATE TABLE IF NOT EXISTS parts (
    group_id         INTEGER NOT NULL,
    member           INTEGER NOT NULL,
    start            INTEGER NOT NULL,      -- tokens of the member before these
    attempt          INTEGER NOT NULL,
    tokens           INTEGER NOT NULL,
    oldest_version   INTEGER NOT NULL,
    payload          BLOB NOT NULL,
    PRIMARY KEY (group_id, member, start)
) STRICT;

CREATE TABLE IF NOT EXISTS evaluations (
    version          INTEGER PRIMARY KEY,
    opened_at_s      REAL NOT NULL,
    figures          TEXT,                  -- NULL while it goes on
    step             INTEGER                -- the step among whose metrics they are
) STRICT;

CREATE TABLE IF NOT EXISTS steps (
    step             INTEGER PRIMARY KEY,
    finished_at_s    REAL NOT NULL,
    metrics          TEXT NOT NULL
) STRICT;

-- How far the learner's log-probabilities were from those that a worker sampled a group with, in nats.
CREATE TABLE IF NOT EXISTS log_prob_differences (
    step             INTEGER NOT NULL,
    group_id         INTEGER NOT NULL,
    worker_id        TEXT NOT NULL,
    oldest_version   INTEGER NOT NULL,
    newest_version   INTEGER NOT NULL,
    tokens           INTEGER NOT NULL,
    mean             REAL NOT NULL,
    max              REAL NOT NULL,
    PRIMARY KEY (step, group_id, worker_id)
) STRICT;

CREATE TABLE IF NOT EXISTS disseminations (
    version          INTEGER NOT NULL,
    snapshot_id      TEXT NOT NULL,
    announced_at_s   REAL NOT NULL,
    worker_id        TEXT NOT NULL,
    loaded_at_s      REAL NOT NULL,
    fetch_s          REAL NOT NULL,
    PRIMARY KEY (snapshot_id, version, worker_id)
) STRICT;

CREATE TABLE IF NOT EXISTS paid_intervals (
    name                TEXT NOT NULL,
    offer               TEXT NOT NULL,
    price_usd_per_hour  REAL NOT NULL,
    launched_at_s       REAL NOT NULL,
    terminated_at_s     REAL,
    PRIMARY KEY (name, launched_at_s)
) STRICT;

-- Machines whose workers are to finish what they hold and leave.
CREATE TABLE IF NOT EXISTS draining (
    name      TEXT PRIMARY KEY,
    since_s   REAL NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS events (
    at_s      REAL NOT NULL,
    kind      TEXT NOT NULL,
    subject   TEXT NOT NULL,
    detail    TEXT NOT NULL
) STRICT;
