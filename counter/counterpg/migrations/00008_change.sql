-- For headcount.change: change.sql has the function.
-- +goose Up
-- The rules of the server that started last. The first that fits a key holds.
CREATE TABLE headcount_rules (
    place   int      NOT NULL,
    kind    smallint NOT NULL, -- as in headcount_counters
    floor   bigint,
    ceiling bigint,
    kept    bigint   NOT NULL, -- of ledger entries, milliseconds; 0: for ever
    site    text COLLATE "C" NOT NULL,
    match   text COLLATE "C" NOT NULL,
    PRIMARY KEY (site, place)
);

-- Counters that the function has changed and that no server has published yet.
CREATE TABLE headcount_changed (
    id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text COLLATE "C" NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
