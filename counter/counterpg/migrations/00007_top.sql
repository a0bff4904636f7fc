-- What gained most under rules with top.
-- +goose Up
-- Counters that may have gained most in a step that is not closed; steps of the rule's finest bucket.
CREATE TABLE headcount_marks (
    number bigint NOT NULL,
    match  text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL,
    PRIMARY KEY (match, number, key)
);

-- Steps that are closed.
CREATE TABLE headcount_tops (
    number bigint NOT NULL,
    step   int    NOT NULL, -- seconds
    match  text COLLATE "C" NOT NULL,
    list   bytea  NOT NULL, -- JSON: [{"key":…,"value":…},…], most first
    PRIMARY KEY (match, step, number)
);
