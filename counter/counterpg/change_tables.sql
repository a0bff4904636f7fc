-- The tables of headcount.change, in {tables}, the schema of the others. They are made at the start and not by a migration:
-- releases that do not know them can use the others.
-- The rules of the server that started last. The first that fits a key holds.
CREATE TABLE IF NOT EXISTS {tables}.headcount_rules (
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
CREATE TABLE IF NOT EXISTS {tables}.headcount_changed (
    id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text COLLATE "C" NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
