-- For Redis in front: package persistent has the words.
-- +goose Up
-- front says which generation of Redis may write here, and its last epoch that is here.
CREATE TABLE headcount_front (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    generation bigint  NOT NULL,
    epoch      bigint  NOT NULL
) WITH (fillfactor = 50);
INSERT INTO headcount_front (generation, epoch) VALUES (0, 0);

-- Operations that are also in Redis: made, or aborted by who found one open. They are
-- forgotten after a day.
CREATE TABLE headcount_transactions (
    id   text COLLATE "C" PRIMARY KEY,
    made boolean NOT NULL,
    at   bigint  NOT NULL
);
CREATE INDEX headcount_transactions_at ON headcount_transactions (at);
