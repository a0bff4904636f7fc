-- The package doc of pgstore defends this design. Times are unix milliseconds.
-- +goose Up
CREATE TABLE headcount_counters (
    value       bigint   NOT NULL DEFAULT 0,
    updated     bigint   NOT NULL DEFAULT 0, -- last change
    incarnation bigint   NOT NULL DEFAULT 0,
    sequence    bigint   NOT NULL DEFAULT 0,
    entries     bigint   NOT NULL DEFAULT 0, -- seq of the newest entry of its ledger; 0: none was made
    set_id      bigint   NOT NULL DEFAULT 0, -- its members; 0: it never had any
    ledger_id   bigint   NOT NULL DEFAULT 0, -- 0: it never had one
    kept        bigint   NOT NULL DEFAULT 0, -- how long entries are kept, milliseconds; 0: for ever
    kind        smallint NOT NULL DEFAULT 0, -- 1 sum, 2 exact, 3 members; 0 is never committed
    key         text COLLATE "C" PRIMARY KEY
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE headcount_members (
    set_id bigint NOT NULL,
    member text COLLATE "C" NOT NULL,
    PRIMARY KEY (set_id, member)
);

CREATE TABLE headcount_ledger (
    ledger_id bigint   NOT NULL,
    seq       bigint   NOT NULL,
    at        bigint   NOT NULL,
    delta     bigint   NOT NULL,
    before    bigint   NOT NULL,
    op        smallint NOT NULL, -- 1 increment, 2 decrement, 3 adjust, 4 reset
    reason    text     NOT NULL,
    author    text     NOT NULL,
    PRIMARY KEY (ledger_id, seq)
);

CREATE TABLE headcount_identities (
    id    uuid   PRIMARY KEY,
    until bigint NOT NULL -- when it is forgotten
);
CREATE INDEX headcount_identities_until ON headcount_identities (until);

CREATE TABLE headcount_sweeps (
    id      bigint  PRIMARY KEY, -- of a ledger or a set
    due     bigint  NOT NULL,    -- when somebody is to look at it
    kept    bigint  NOT NULL,    -- of a ledger that lives: how long its entries are kept
    garbage boolean NOT NULL     -- it is no counter's any more: all of it goes
);
CREATE INDEX headcount_sweeps_due ON headcount_sweeps (due);

-- deleted is the highest incarnation that was ever deleted.
CREATE TABLE headcount_meta (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    deleted bigint  NOT NULL
) WITH (fillfactor = 50);
INSERT INTO headcount_meta (deleted) VALUES (0);

-- Ids of sets and ledgers. A process takes a block of them at a time.
CREATE SEQUENCE headcount_ids INCREMENT BY 1048576;
