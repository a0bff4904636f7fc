-- Registers of counters of kind unique (4): package hyperloglog has their form.
-- What sums gained in steps of time.
-- +goose Up
CREATE TABLE headcount_registers (
    set_id    bigint PRIMARY KEY, -- as in headcount_members
    registers bytea  NOT NULL     -- it does not compress
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE headcount_registers ALTER registers SET STORAGE EXTERNAL;

ALTER TABLE headcount_counters
    ADD history_id bigint NOT NULL DEFAULT 0,           -- 0: it has none
    ADD slots      text COLLATE "C" NOT NULL DEFAULT ''; -- the steps that are running: " step:number:gained" for each

-- Steps that are over.
CREATE TABLE headcount_gains (
    history_id bigint NOT NULL,
    step       int    NOT NULL, -- seconds
    number     bigint NOT NULL, -- of the step since the Unix epoch
    gain       bigint NOT NULL,
    PRIMARY KEY (history_id, step, number)
);

-- A history is swept for each of its steps.
ALTER TABLE headcount_sweeps ADD step int NOT NULL DEFAULT 0; -- seconds; 0: of a ledger, or of all of an id
ALTER TABLE headcount_sweeps DROP CONSTRAINT headcount_sweeps_pkey;
ALTER TABLE headcount_sweeps ADD PRIMARY KEY (id, step);
