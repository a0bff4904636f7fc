-- headcount.change, for applications that change exact counters in transactions of their own. A server replaces this
-- text at its start. {tables} is the schema of the tables, and {printable} a bracket expression of what a key may have.
--
-- The function does what counter.Judge does for an Add, and takes locks in the order of Store.Apply: the counter, then
-- the idempotency key. It runs with the rights of its owner, so nothing in it depends on the caller's settings: every
-- table has its schema, functions and operators are those of pg_catalog, no literal has a backslash, and texts are
-- compared byte by byte.

-- wrap64 returns the low 64 bits of n: bigint arithmetic fails where that of xxHash wraps around.
CREATE OR REPLACE FUNCTION headcount.wrap64(n numeric) RETURNS bigint LANGUAGE sql IMMUTABLE AS $headcount$
    SELECT (((n + 9223372036854775808) % 18446744073709551616 + 18446744073709551616) % 18446744073709551616
        - 9223372036854775808)::bigint
$headcount$;

CREATE OR REPLACE FUNCTION headcount.rotate64(n bigint, bits int) RETURNS bigint LANGUAGE sql IMMUTABLE AS $headcount$
    SELECT n << bits | (n >> 64 - bits & (1::bigint << bits) - 1)
$headcount$;

-- xxhash64 returns the hash by which keys are distributed over partitions, with seed 0.
CREATE OR REPLACE FUNCTION headcount.xxhash64(b bytea) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $headcount$
DECLARE
    p1 CONSTANT bigint := -7046029288634856825;
    p2 CONSTANT bigint := -4417276706812531889;
    p3 CONSTANT bigint := 1609587929392839161;
    p4 CONSTANT bigint := -8796714831421723037;
    p5 CONSTANT bigint := 2870177450012600261;
    size CONSTANT int := length(b);
    lanes bigint[] := ARRAY[headcount.wrap64(p1::numeric + p2), p2, 0, -p1];
    h bigint := p5;
    word bigint;
    i int := 0;
BEGIN
    IF size >= 32 THEN
        WHILE i + 32 <= size LOOP
            FOR lane IN 1..4 LOOP
                word := 0;
                FOR j IN REVERSE 7..0 LOOP
                    word := word << 8 | get_byte(b, i + j);
                END LOOP;
                word := headcount.wrap64(lanes[lane] + word::numeric * p2);
                lanes[lane] := headcount.wrap64(headcount.rotate64(word, 31)::numeric * p1);
                i := i + 8;
            END LOOP;
        END LOOP;
        h := headcount.wrap64(headcount.rotate64(lanes[1], 1)::numeric + headcount.rotate64(lanes[2], 7)
            + headcount.rotate64(lanes[3], 12) + headcount.rotate64(lanes[4], 18));
        FOR lane IN 1..4 LOOP
            word := headcount.wrap64(headcount.rotate64(headcount.wrap64(lanes[lane]::numeric * p2), 31)::numeric * p1);
            h := headcount.wrap64((h # word)::numeric * p1 + p4);
        END LOOP;
    END IF;
    h := headcount.wrap64(h::numeric + size);
    WHILE i + 8 <= size LOOP
        word := 0;
        FOR j IN REVERSE 7..0 LOOP
            word := word << 8 | get_byte(b, i + j);
        END LOOP;
        word := headcount.wrap64(headcount.rotate64(headcount.wrap64(word::numeric * p2), 31)::numeric * p1);
        h := headcount.wrap64(headcount.rotate64(h # word, 27)::numeric * p1 + p4);
        i := i + 8;
    END LOOP;
    IF i + 4 <= size THEN
        word := 0;
        FOR j IN REVERSE 3..0 LOOP
            word := word << 8 | get_byte(b, i + j);
        END LOOP;
        h := headcount.wrap64(headcount.rotate64(h # headcount.wrap64(word::numeric * p1), 23)::numeric * p2 + p3);
        i := i + 4;
    END IF;
    WHILE i < size LOOP
        h := headcount.wrap64(headcount.rotate64(h # headcount.wrap64(get_byte(b, i)::numeric * p5), 11)::numeric * p1);
        i := i + 1;
    END LOOP;
    h := headcount.wrap64((h # (h >> 33 & 2147483647))::numeric * p2);
    h := headcount.wrap64((h # (h >> 29 & 34359738367))::numeric * p3);
    RETURN h # (h >> 32 & 4294967295);
END
$headcount$;

-- identity returns counter.NewIdempotencyKey(key, "", idempotency_key): a call over HTTP with an API key has the same.
CREATE OR REPLACE FUNCTION headcount.identity(key text, idempotency_key text) RETURNS uuid
LANGUAGE plpgsql IMMUTABLE AS $headcount$
DECLARE
    name   CONSTANT bytea := convert_to(key, 'UTF8');
    size   CONSTANT int := length(name);
    prefix CONSTANT bigint := headcount.xxhash64(name);
    -- The length of the key as a varint.
    head   CONSTANT text := CASE WHEN size < 128 THEN lpad(to_hex(size), 2, '0')
        ELSE to_hex(size & 127 | 128) || lpad(to_hex(size >> 7), 2, '0') END;
    hash   bytea := substr(sha256(decode(head, 'hex') || name || decode('00', 'hex')
        || convert_to(idempotency_key, 'UTF8')), 1, 16);
BEGIN
    FOR i IN 0..3 LOOP
        hash := set_byte(hash, i, (prefix >> 8 * i & 255)::int);
    END LOOP;
    RETURN encode(hash, 'hex')::uuid;
END
$headcount$;

CREATE OR REPLACE FUNCTION headcount.change(key text, delta bigint, reason text DEFAULT NULL,
    author text DEFAULT NULL, idempotency_key text DEFAULT NULL, site text DEFAULT 'default')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off -- as in the sessions of the server
AS $headcount$
#variable_conflict use_column
DECLARE
    name     CONSTANT text COLLATE "C" := key;
    -- The key with its site, as the tables have it.
    counter  CONSTANT text COLLATE "C" :=
        CASE site WHEN 'default' THEN key ELSE chr(31) || site || chr(31) || key END;
    rule     {tables}.headcount_rules%ROWTYPE;
    had      {tables}.headcount_counters%ROWTYPE;
    id       uuid;
    latest   bigint; -- incarnation of all counters that were deleted
    changed  bigint; -- the value after the change
    moment   timestamptz;
    due      timestamptz; -- when the ledger is to be swept
    fresh    boolean;
    problem  text;
BEGIN
    problem := CASE
        WHEN name IS NULL OR char_length(name) NOT BETWEEN 1 AND 128 THEN 'key: give 1 to 128 characters'
        WHEN name IN ('-', '.', '..') THEN 'key: ' || name || ' is reserved; choose another one'
        WHEN name !~ '^[{printable}]+$' OR strpos(name, chr(65533)) > 0 THEN
            'key: only letters, marks, numbers, punctuation without *, symbols and spaces are allowed'
        WHEN ascii(left(name, 1)) IN (8204, 8205) OR ascii(right(name, 1)) IN (8204, 8205) THEN
            'key: a joiner may not be the first or last character'
        WHEN delta IS NULL OR delta NOT BETWEEN -1000000000000 AND 1000000000000 OR delta = 0 THEN
            'delta: give 1 to 1000000000000 or -1 to -1000000000000'
        WHEN char_length(reason) NOT BETWEEN 1 AND 200 THEN 'reason: give 1 to 200 characters, or null'
        WHEN char_length(author) NOT BETWEEN 1 AND 200 THEN 'author: give 1 to 200 characters, or null'
        WHEN octet_length(idempotency_key) NOT BETWEEN 1 AND 255 THEN 'idempotency_key: give 1 to 255 bytes, or null'
    END;
    IF problem IS NULL THEN
        SELECT * INTO rule FROM {tables}.headcount_rules r WHERE r.site = change.site COLLATE "C"
                AND (r.match = name OR right(r.match, 1) = '*' AND starts_with(name, left(r.match, -1)))
            ORDER BY r.place LIMIT 1;
        IF rule.kind IS DISTINCT FROM 'exact' THEN
            problem := format(
                'counter "%s": its rule is not of kind exact; change --counters and start a server, or call HTTP', name);
        END IF;
    END IF;
    IF problem IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = problem;
    END IF;

    INSERT INTO {tables}.headcount_counters AS c (key, kind) VALUES (counter, '')
        ON CONFLICT (key) DO UPDATE SET kind = c.kind WHERE false;
    fresh := true;
    FOR had IN SELECT * FROM {tables}.headcount_counters c WHERE c.key = counter LOOP
        IF NOT fresh THEN -- above READ COMMITTED one that was deleted since the snapshot is there, too
            RAISE serialization_failure USING MESSAGE = format('counter "%s" was deleted meanwhile', name);
        END IF;
        fresh := false;
    END LOOP;
    moment := date_trunc('milliseconds', clock_timestamp());
    IF idempotency_key IS NOT NULL THEN
        id := headcount.identity(counter, idempotency_key);
        INSERT INTO {tables}.headcount_row_ids AS i (partition, id, until)
            VALUES (get_byte(uuid_send(id), 0) & 63, id, moment + interval '1 day')
            ON CONFLICT (partition, id) DO UPDATE SET until = excluded.until WHERE i.until <= moment;
        IF NOT FOUND THEN
            DELETE FROM {tables}.headcount_counters c WHERE c.key = counter AND c.kind = ''; -- it was deleted since then
            RETURN had.value;
        END IF;
    END IF;
    IF had.kind NOT IN ('', 'exact') THEN
        RAISE invalid_parameter_value USING MESSAGE = format(
            'counter "%s": it was made with another kind; give its rule that kind again, or delete it', name);
    END IF;
    changed := had.value + delta; -- or 22003
    IF delta < 0 AND changed < rule.floor THEN
        RAISE check_violation USING CONSTRAINT = 'headcount_floor',
            MESSAGE = format('counter "%s": its floor is %s, and it is %s', name, rule.floor, had.value);
    ELSIF delta > 0 AND changed > rule.ceiling THEN
        RAISE check_violation USING CONSTRAINT = 'headcount_ceiling',
            MESSAGE = format('counter "%s": its ceiling is %s, and it is %s', name, rule.ceiling, had.value);
    END IF;

    IF had.kind = '' THEN
        SELECT deleted INTO STRICT latest FROM {tables}.headcount_meta;
        had.incarnation := greatest((extract(epoch FROM moment) * 1000)::bigint, 1, latest + 1);
    END IF;
    fresh := had.entries = 0;
    IF fresh AND rule.kept > 0 OR NOT fresh AND rule.kept <> had.kept THEN
        due := CASE WHEN fresh THEN moment + rule.kept * interval '1 millisecond' ELSE moment END;
        INSERT INTO {tables}.headcount_sweeps (key, incarnation, due, kept)
            VALUES (counter, had.incarnation, due, rule.kept)
            ON CONFLICT (key, incarnation) DO UPDATE SET due = excluded.due, kept = excluded.kept;
    END IF;
    UPDATE {tables}.headcount_counters c
        SET kind = 'exact', value = changed, updated_at = moment, incarnation = had.incarnation,
            sequence = had.sequence + 1, entries = had.entries + 1, kept = rule.kept
        WHERE c.key = counter;
    INSERT INTO {tables}.headcount_ledger (key, incarnation, seq, at, op, delta, before, after, reason, author)
        VALUES (counter, had.incarnation, had.entries + 1, moment,
            CASE WHEN delta > 0 THEN 'increment' ELSE 'decrement' END, delta, had.value, changed,
            coalesce(reason, ''), coalesce(author, ''));
    INSERT INTO {tables}.headcount_changed (key) VALUES (counter);
    RETURN changed;
END
$headcount$;

REVOKE ALL ON FUNCTION headcount.wrap64, headcount.rotate64, headcount.xxhash64, headcount.identity, headcount.change
FROM PUBLIC;
