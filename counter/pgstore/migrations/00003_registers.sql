-- Registers of counters of kind unique (4): package hyperloglog has their form.
-- +goose Up
CREATE TABLE headcount_registers (
    set_id    bigint PRIMARY KEY, -- as in headcount_members
    registers bytea  NOT NULL     -- it does not compress
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE headcount_registers ALTER registers SET STORAGE EXTERNAL;
