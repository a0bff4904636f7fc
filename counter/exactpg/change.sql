-- headcount.change, reserve, commit and cancel, for applications that change exact counters in transactions of their own.
-- A server replaces this text at its start. {tables} is the schema of the tables, and {printable} a bracket expression
-- of what a key may have.
--
-- The functions do what counter.Judge does, and take locks in the order of Store.Apply: the counter, then the
-- idempotency key. They run with the rights of their owner, so nothing in them depends on the caller's settings: every
-- table has its schema, functions and operators are those of pg_catalog, no literal has a backslash, and texts are
-- compared byte by byte. The functions without rights and settings of their own are called by these alone.

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

-- misnamed returns why a name cannot be that of a counter, or of a reservation, which may have a *; null if it can be.
CREATE OR REPLACE FUNCTION headcount.misnamed(thing text, name text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $headcount$
DECLARE
    given  CONSTANT text COLLATE "C" := name;
    -- A * alone is reserved.
    plain  CONSTANT text COLLATE "C" := CASE WHEN thing = 'id' AND given <> '*' THEN replace(given, '*', 'x') ELSE given END;
    allows CONSTANT text := CASE thing WHEN 'id' THEN 'punctuation' ELSE 'punctuation without *' END;
BEGIN
    RETURN CASE
        WHEN given IS NULL OR char_length(given) NOT BETWEEN 1 AND 128 THEN thing || ': give 1 to 128 characters'
        WHEN given IN ('-', '.', '..') THEN thing || ': ' || given || ' is reserved; choose another one'
        WHEN plain !~ '^[{printable}]+$' OR strpos(given, chr(65533)) > 0 THEN
            thing || ': only letters, marks, numbers, ' || allows || ', symbols and spaces are allowed'
        WHEN ascii(left(given, 1)) IN (8204, 8205) OR ascii(right(given, 1)) IN (8204, 8205) THEN
            thing || ': a joiner may not be the first or last character'
    END;
END
$headcount$;

-- rule_of returns the rule of a key, which is exact; a problem with the arguments goes first.
CREATE OR REPLACE FUNCTION headcount.rule_of(name text, site text, problem text) RETURNS {tables}.headcount_rules
LANGUAGE plpgsql AS $headcount$
DECLARE
    rule {tables}.headcount_rules%ROWTYPE;
BEGIN
    IF problem IS NULL THEN
        SELECT * INTO rule FROM {tables}.headcount_rules r WHERE r.site = rule_of.site COLLATE "C"
                AND (r.match = name COLLATE "C" OR right(r.match, 1) = '*' AND starts_with(name COLLATE "C", left(r.match, -1)))
            ORDER BY r.place LIMIT 1;
        IF rule.kind IS DISTINCT FROM 'exact' THEN
            problem := format(
                'counter "%s": its rule is not of kind exact; change --counters and start a server, or call HTTP', name);
        END IF;
    END IF;
    IF problem IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = problem;
    END IF;
    RETURN rule;
END
$headcount$;

-- locked locks the row of a counter and returns it. One that does not exist gets a row without a kind.
CREATE OR REPLACE FUNCTION headcount.locked(counter text, name text) RETURNS {tables}.headcount_counters
LANGUAGE plpgsql AS $headcount$
DECLARE
    had    {tables}.headcount_counters%ROWTYPE;
    latest bigint; -- incarnation of all counters that were deleted
BEGIN
    INSERT INTO {tables}.headcount_counters AS c (key, kind) VALUES (counter, '')
        ON CONFLICT (key) DO UPDATE SET kind = c.kind WHERE false;
    SELECT * INTO had FROM {tables}.headcount_counters c WHERE c.key = counter COLLATE "C";
    IF NOT FOUND THEN -- above READ COMMITTED one that was deleted since the snapshot is there, too
        RAISE serialization_failure USING MESSAGE = format('counter "%s" was deleted meanwhile', name);
    END IF;
    IF had.kind = '' THEN
        SELECT deleted INTO STRICT latest FROM {tables}.headcount_meta;
        had.incarnation := greatest((extract(epoch FROM clock_timestamp()) * 1000)::bigint, 1, latest + 1);
    END IF;
    RETURN had;
END
$headcount$;

-- enter changes a counter that is locked, and returns its value after that. Reserving is by how much open reservations
-- grow, and carts by how many.
CREATE OR REPLACE FUNCTION headcount.enter(had {tables}.headcount_counters, rule {tables}.headcount_rules, name text,
    moment timestamptz, op text, delta bigint, reserving bigint, carts int, reason text, author text) RETURNS bigint
LANGUAGE plpgsql AS $headcount$
DECLARE
    changed  bigint; -- the value after the change
    held     CONSTANT bigint := had.reserved + reserving;
    fresh    CONSTANT boolean := had.entries = 0;
    due      timestamptz; -- when the ledger is to be swept
BEGIN
    IF had.kind NOT IN ('', 'exact') THEN
        RAISE invalid_parameter_value USING MESSAGE = format(
            'counter "%s": it was made with another kind; give its rule that kind again, or delete it', name);
    END IF;

    -- What is reserved may come back, so an increase leaves room for it, and what comes back is not judged.
    changed := had.value + delta; -- or 22003
    IF op <> 'cancel' AND delta < 0 AND changed < rule.floor THEN
        RAISE check_violation USING CONSTRAINT = 'headcount_floor',
            MESSAGE = format('counter "%s": its floor is %s, and it is %s', name, rule.floor, had.value);
    ELSIF op <> 'cancel' AND delta > 0 AND changed + held > rule.ceiling THEN
        RAISE check_violation USING CONSTRAINT = 'headcount_ceiling',
            MESSAGE = format('counter "%s": its ceiling is %s, and it is %s', name, rule.ceiling, had.value);
    END IF;
    PERFORM changed + held; -- or 22003

    IF fresh AND rule.kept > 0 OR NOT fresh AND rule.kept <> had.kept THEN
        due := CASE WHEN fresh THEN moment + rule.kept * interval '1 millisecond' ELSE moment END;
        INSERT INTO {tables}.headcount_sweeps (key, incarnation, due, kept)
            VALUES (had.key, had.incarnation, due, rule.kept)
            ON CONFLICT (key, incarnation) DO UPDATE SET due = excluded.due, kept = excluded.kept;
    END IF;
    UPDATE {tables}.headcount_counters c
        SET kind = 'exact', value = changed, updated_at = moment, incarnation = had.incarnation,
            sequence = had.sequence + 1, entries = had.entries + 1, kept = rule.kept,
            reserved = held, open = had.open + carts
        WHERE c.key = had.key;
    INSERT INTO {tables}.headcount_ledger (key, incarnation, seq, at, op, delta, before, after, reason, author)
        VALUES (had.key, had.incarnation, had.entries + 1, moment, op, delta, had.value, changed,
            coalesce(reason, ''), coalesce(author, ''));
    INSERT INTO {tables}.headcount_changed (key) VALUES (had.key);
    RETURN changed;
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
    name    CONSTANT text COLLATE "C" := key;
    -- The key with its site, as the tables have it.
    counter CONSTANT text COLLATE "C" :=
        CASE site WHEN 'default' THEN key ELSE chr(31) || site || chr(31) || key END;
    rule    CONSTANT {tables}.headcount_rules := headcount.rule_of(key, site, coalesce(headcount.misnamed('key', key), CASE
        WHEN delta IS NULL OR delta NOT BETWEEN -1000000000000 AND 1000000000000 OR delta = 0 THEN
            'delta: give 1 to 1000000000000 or -1 to -1000000000000'
        WHEN char_length(reason) NOT BETWEEN 1 AND 200 THEN 'reason: give 1 to 200 characters, or null'
        WHEN char_length(author) NOT BETWEEN 1 AND 200 THEN 'author: give 1 to 200 characters, or null'
        WHEN octet_length(idempotency_key) NOT BETWEEN 1 AND 255 THEN 'idempotency_key: give 1 to 255 bytes, or null'
    END));
    had     CONSTANT {tables}.headcount_counters := headcount.locked(counter, name);
    moment  CONSTANT timestamptz := date_trunc('milliseconds', clock_timestamp());
    id      uuid;
BEGIN
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
    RETURN headcount.enter(had, rule, name, moment, CASE WHEN delta > 0 THEN 'increment' ELSE 'decrement' END,
        delta, 0, 0, reason, author);
END
$headcount$;

-- hold is reserve, commit and cancel.
CREATE OR REPLACE FUNCTION headcount.hold(verb text, key text, id text, amount bigint, span interval, reason text,
    author text, site text)
RETURNS bigint LANGUAGE plpgsql AS $headcount$
#variable_conflict use_column
DECLARE
    counter CONSTANT text COLLATE "C" :=
        CASE site WHEN 'default' THEN key ELSE chr(31) || site || chr(31) || key END;
    cart    CONSTANT text COLLATE "C" := id;
    seconds CONSTANT numeric := extract(epoch FROM span);
    rule    CONSTANT {tables}.headcount_rules := headcount.rule_of(key, site, coalesce(
        headcount.misnamed('key', key), headcount.misnamed('id', id), CASE
        WHEN verb = 'reserve' AND (amount BETWEEN 1 AND 1000000000000) IS NOT TRUE THEN 'amount: give 1 to 1000000000000'
        WHEN verb = 'reserve' AND (seconds BETWEEN 1 AND 2678400) IS NOT TRUE THEN 'for: give 1s to 31d'
        WHEN char_length(reason) NOT BETWEEN 1 AND 200 THEN 'reason: give 1 to 200 characters, or null'
        WHEN char_length(author) NOT BETWEEN 1 AND 200 THEN 'author: give 1 to 200 characters, or null'
    END));
    had     CONSTANT {tables}.headcount_counters := headcount.locked(counter, key);
    moment  CONSTANT timestamptz := date_trunc('milliseconds', clock_timestamp());
    is_now  {tables}.headcount_reservations%ROWTYPE;
    becomes CONSTANT text := CASE verb WHEN 'reserve' THEN 'open' WHEN 'commit' THEN 'committed' ELSE 'cancelled' END;
    changed bigint;
BEGIN
    SELECT * INTO is_now FROM {tables}.headcount_reservations r
        WHERE r.key = counter AND r.incarnation = had.incarnation AND r.id = cart
            AND (r.ended IS NULL OR r.ended > moment - interval '1 day');
    IF is_now.status = becomes AND (verb <> 'reserve' OR is_now.amount = amount)
            OR verb = 'cancel' AND is_now.status = 'expired' THEN
        RETURN had.value; -- it is as it should be
    END IF;

    IF verb <> 'reserve' AND is_now.status IS NULL THEN
        RAISE no_data_found USING MESSAGE = format('counter "%s": there is no reservation "%s"', key, id);
    ELSIF verb = 'reserve' AND is_now.status IN ('open', 'committed') OR verb <> 'reserve' AND is_now.status <> 'open' THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = format(
            'counter "%s": the reservation "%s" is %s, with the amount %s', key, id, is_now.status, is_now.amount);
    ELSIF verb = 'reserve' AND had.open >= 10000 THEN
        RAISE program_limit_exceeded USING MESSAGE = format('counter "%s" has 10000 open reservations', key);
    END IF;

    IF verb = 'reserve' THEN
        changed := headcount.enter(had, rule, key, moment, verb, -amount, amount, 1, reason, author);
        INSERT INTO {tables}.headcount_reservations AS r (key, incarnation, id, amount, until, status)
            VALUES (counter, had.incarnation, cart, amount,
                moment + (ceil(seconds * 1000) + 1) * interval '1 millisecond', 'open')
            ON CONFLICT (key, incarnation, id) DO UPDATE
                SET amount = excluded.amount, until = excluded.until, status = 'open', ended = NULL;
        RETURN changed;
    END IF;
    UPDATE {tables}.headcount_reservations r SET status = becomes, ended = moment
        WHERE r.key = counter AND r.incarnation = had.incarnation AND r.id = cart;
    RETURN headcount.enter(had, rule, key, moment, verb, CASE verb WHEN 'cancel' THEN is_now.amount ELSE 0 END,
        -is_now.amount, -1, reason, author);
END
$headcount$;

CREATE OR REPLACE FUNCTION headcount.reserve(key text, amount bigint, "for" interval, id text, reason text DEFAULT NULL,
    author text DEFAULT NULL, site text DEFAULT 'default')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $headcount$
BEGIN
    RETURN headcount.hold('reserve', key, id, amount, "for", reason, author, site);
END
$headcount$;

CREATE OR REPLACE FUNCTION headcount.commit(key text, id text, site text DEFAULT 'default')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $headcount$
BEGIN
    RETURN headcount.hold('commit', key, id, NULL, NULL, NULL, NULL, site);
END
$headcount$;

CREATE OR REPLACE FUNCTION headcount.cancel(key text, id text, site text DEFAULT 'default')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
AS $headcount$
BEGIN
    RETURN headcount.hold('cancel', key, id, NULL, NULL, NULL, NULL, site);
END
$headcount$;

REVOKE ALL ON FUNCTION headcount.wrap64, headcount.rotate64, headcount.xxhash64, headcount.identity, headcount.misnamed,
    headcount.rule_of, headcount.locked, headcount.enter, headcount.hold, headcount.change, headcount.reserve,
    headcount.commit, headcount.cancel
FROM PUBLIC;
