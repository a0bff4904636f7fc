-- The package doc of pagestable explains this design.
-- +goose Up
CREATE TABLE headcount_pages (
    page        text COLLATE "C" NOT NULL,
    count       bigint           NOT NULL DEFAULT 0,
    updated_at  timestamptz      NOT NULL DEFAULT 'epoch', -- the last change of the count
    version     text GENERATED ALWAYS AS (incarnation::text || '-' || sequence::text) STORED,
    site        text COLLATE "C" NOT NULL DEFAULT 'default',
    incarnation bigint           NOT NULL DEFAULT 0,
    sequence    bigint           NOT NULL DEFAULT 0,
    PRIMARY KEY (page, site)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
