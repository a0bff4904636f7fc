-- +goose Up
ALTER TABLE headcount_counters
    ADD COLUMN reserved bigint NOT NULL DEFAULT 0, -- of all open reservations, together
    ADD COLUMN open     bigint NOT NULL DEFAULT 0; -- how many these are

-- Reservations that are open, or have ended within a day.
CREATE TABLE headcount_reservations (
    key         text COLLATE "C" NOT NULL,
    incarnation bigint           NOT NULL, -- of the counter, as in headcount_ledger
    id          text COLLATE "C" NOT NULL,
    amount      bigint           NOT NULL,
    until       timestamptz      NOT NULL,
    status      text             NOT NULL, -- open, committed, cancelled, expired
    ended       timestamptz,               -- when that was; null while it is open
    PRIMARY KEY (key, incarnation, id)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX headcount_reservations_open ON headcount_reservations (key, incarnation, id) WHERE status = 'open';
CREATE INDEX headcount_reservations_due ON headcount_reservations (until) WHERE status = 'open';
CREATE INDEX headcount_reservations_ended ON headcount_reservations (ended) WHERE ended IS NOT NULL;
