-- The package doc of exactpg explains this design. Idempotency keys are in headcount_row_ids, which package rowspg makes.
-- +goose Up
CREATE TABLE headcount_counters (
    key         text COLLATE "C" PRIMARY KEY,
    kind        text        NOT NULL,
    value       bigint      NOT NULL DEFAULT 0,
    updated_at  timestamptz NOT NULL DEFAULT 'epoch',
    version     text GENERATED ALWAYS AS (incarnation::text || '-' || sequence::text) STORED,
    incarnation bigint      NOT NULL DEFAULT 0,
    sequence    bigint      NOT NULL DEFAULT 0,
    entries     bigint      NOT NULL DEFAULT 0, -- seq of the newest entry of its ledger; 0: none was made
    kept        bigint      NOT NULL DEFAULT 0  -- how long entries are kept, milliseconds; 0: for ever
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE headcount_ledger (
    key         text COLLATE "C" NOT NULL,
    incarnation bigint           NOT NULL, -- of the counter: one that is made again begins a new ledger
    seq         bigint           NOT NULL,
    at          timestamptz      NOT NULL,
    op          text             NOT NULL,
    delta       bigint           NOT NULL,
    before      bigint           NOT NULL,
    after       bigint           NOT NULL,
    reason      text             NOT NULL,
    author      text             NOT NULL,
    PRIMARY KEY (key, incarnation, seq)
);

-- Ledgers of exact counters that somebody is to look at: entries end, or the counter is gone.
CREATE TABLE headcount_sweeps (
    key         text COLLATE "C" NOT NULL,
    incarnation bigint           NOT NULL,
    due         timestamptz      NOT NULL,
    kept        bigint           NOT NULL, -- as in headcount_counters
    PRIMARY KEY (key, incarnation)
);
CREATE INDEX headcount_sweeps_due ON headcount_sweeps (due);

-- deleted is the highest incarnation of an exact counter that was ever deleted.
CREATE TABLE headcount_meta (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    deleted bigint  NOT NULL
) WITH (fillfactor = 50);
INSERT INTO headcount_meta (deleted) VALUES (0);

-- The rules of the server that started last, for headcount.change. The first that fits a key holds.
CREATE TABLE headcount_rules (
    place   int    NOT NULL,
    kind    text   NOT NULL,
    floor   bigint,
    ceiling bigint,
    kept    bigint NOT NULL, -- of ledger entries, milliseconds; 0: for ever
    site    text COLLATE "C" NOT NULL,
    match   text COLLATE "C" NOT NULL,
    PRIMARY KEY (site, place)
);

-- Counters that headcount.change has changed and that no server has published yet.
CREATE TABLE headcount_changed (
    id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text COLLATE "C" NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
