-- What sums counted under the values of their dimensions.
-- +goose Up
CREATE TABLE headcount_dimensions (
    history_id bigint NOT NULL, -- as in headcount_gains
    count      bigint NOT NULL,
    kept       int    NOT NULL, -- of the empty value: how many others there are
    name       text COLLATE "C" NOT NULL,
    value      text COLLATE "C" NOT NULL, -- empty: all values that are not kept
    PRIMARY KEY (history_id, name, value)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
