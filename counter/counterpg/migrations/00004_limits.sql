-- Limits: package limit has the words. Times are unix milliseconds.
-- +goose Up
-- The end changes with each call that passes, due does not: it is when somebody looks whether the
-- state has ended, and so a call touches no index.
CREATE TABLE headcount_limits (
    time_ms   bigint   NOT NULL, -- the window
    ends      bigint   NOT NULL DEFAULT 0,
    due       bigint   NOT NULL DEFAULT 0,
    algorithm smallint NOT NULL,
    key       text COLLATE "C" NOT NULL,
    state     bytea    NOT NULL DEFAULT '',
    PRIMARY KEY (key, algorithm, time_ms)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX headcount_limits_due ON headcount_limits (due);
