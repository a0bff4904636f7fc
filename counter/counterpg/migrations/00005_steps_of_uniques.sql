-- Whom uniques saw in steps of time, also in running ones: package hyperloglog has the form.
-- +goose Up
ALTER TABLE headcount_gains ADD registers bytea; -- null for a sum
ALTER TABLE headcount_gains ALTER registers SET STORAGE EXTERNAL;
