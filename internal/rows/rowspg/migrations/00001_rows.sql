-- The package doc of rowspg explains this design. encode(field, 'escape') shows bytes as a text.
-- +goose Up
CREATE TABLE headcount_partitions (
    partition smallint PRIMARY KEY,
    owner     text     NOT NULL DEFAULT '',
    epoch     bigint   NOT NULL DEFAULT 0, -- of the owner's claim
    number    bigint   NOT NULL DEFAULT 0  -- of the newest commit
) WITH (fillfactor = 50);
INSERT INTO headcount_partitions (partition) SELECT generate_series(0, 63);

CREATE TABLE headcount_rows (
    partition  smallint NOT NULL,
    collection bytea    NOT NULL,
    field      bytea    NOT NULL,
    value      bytea    NOT NULL,
    number     bigint   NOT NULL, -- of the commit that wrote it last
    PRIMARY KEY (partition, collection, field)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

-- Rows that were deleted lately, for Store.Changed. Some of them may have been written again since.
CREATE TABLE headcount_row_deletions (
    partition  smallint    NOT NULL,
    collection bytea       NOT NULL,
    field      bytea       NOT NULL,
    number     bigint      NOT NULL, -- of the commit that deleted it last
    at         timestamptz NOT NULL,
    PRIMARY KEY (partition, collection, field)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX headcount_row_deletions_at ON headcount_row_deletions (at);

CREATE TABLE headcount_row_ids (
    id        uuid        NOT NULL,
    until     timestamptz NOT NULL, -- when it is forgotten
    partition smallint    NOT NULL,
    PRIMARY KEY (partition, id)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX headcount_row_ids_until ON headcount_row_ids (until);
