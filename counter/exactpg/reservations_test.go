package exactpg

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"headcount/counter"
	"headcount/internal/pgtest"
	"headcount/internal/postgres"
	"headcount/internal/testkit"
)

var sqlHistories = flag.Int("sql-histories", 500, "number of random histories of reservations in SQL")

// holding makes a change of a reservation, by Apply or by SQL.
type holding func(c counter.Change) (value int64, err error)

func byApply(t testing.TB, s *Store) holding {
	return func(c counter.Change) (int64, error) {
		r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]
		if r.Err != nil {
			return 0, r.Err
		}

		return r.Counters[0].Value, nil
	}
}

func bySQL(t testing.TB, conn *pgx.Conn) holding {
	return func(c counter.Change) (value int64, err error) {
		call := map[counter.Verb]string{
			counter.Reserve: `select headcount.reserve($1, $2, $3, $4, 'order', 'shop')`,
			counter.Commit:  `select headcount.commit($1, $2)`,
			counter.Cancel:  `select headcount.cancel($1, $2)`,
			counter.Add:     `select headcount.change($1, $2, 'order', 'shop')`,
		}[c.Verb]

		args := []any{c.Key}
		switch c.Verb {
		case counter.Add:
			args = append(args, c.Delta)
		case counter.Reserve:
			args = append(args, c.Delta, c.Hold.For, c.Hold.ID)
		default:
			args = append(args, c.Hold.ID)
		}

		err = conn.QueryRow(t.Context(), call, args...).Scan(&value)

		return value, asConflict(err)
	}
}

// asConflict returns the error that counter.Judge has for an error of the SQL functions.
func asConflict(err error) error {
	is := map[string]error{
		"23514": counter.ErrBound, "22003": counter.ErrOverflow, "P0002": counter.ErrNoReservation,
		"55000": counter.ErrReservation, "54000": counter.ErrReservation,
	}[postgres.Code(err)]
	if is == nil {
		return err
	}

	return &counter.Conflict{Is: is}
}

// TestServerSQLReservations makes random histories by SQL in one database and by counter.Judge in another. Answers,
// refusals and the data in the end are the same. With -sql-histories 10000 it takes some minutes.
func TestServerSQLReservations(t *testing.T) {
	n := *sqlHistories
	if testing.Short() {
		n = min(n, 40)
	}

	server := pgtest.Single(t)
	rules := parseRules(t, stock)
	urls := [2]string{server.Database(t), server.Database(t)}
	judge, mixed := open(t, urls[0]), open(t, urls[1])
	serve(t, mixed, rules)
	ways := [2]holding{byApply(t, judge), bySQL(t, connect(t, shop(t, server, urls[1])))}

	for seed := range uint64(n) {
		h := &sqlHistory{
			t: t, rand: rand.New(rand.NewPCG(seed, 0)), rules: rules, stores: [2]*Store{judge, mixed}, ways: ways,
		}
		h.key = fmt.Sprint([]string{"e:", "free:"}[seed%2], "h", seed)
		h.urls = urls
		h.run()

		if t.Failed() {
			t.Fatalf("history %d differs", seed)
		}
	}
}

type sqlHistory struct {
	t      *testing.T
	rand   *rand.Rand
	rules  *counter.Rules
	stores [2]*Store
	urls   [2]string
	ways   [2]holding
	key    string
}

func (h *sqlHistory) run() {
	h.both(counter.Change{Verb: counter.Add, Delta: 20})

	for range 14 {
		hold := &counter.Hold{
			ID: fmt.Sprint("cart ", h.rand.IntN(4)), For: time.Duration(1+h.rand.IntN(9)) * time.Minute,
		}

		amount := []int64{1, 7, 15, 990, counter.MaxDelta}[h.rand.IntN(5)]
		switch n := h.rand.IntN(10); {
		case n < 4:
			h.both(counter.Change{Verb: counter.Reserve, Delta: amount, Hold: hold})
		case n < 6:
			h.both(counter.Change{Verb: counter.Commit, Hold: hold})
		case n < 8:
			h.both(counter.Change{Verb: counter.Cancel, Hold: hold})
		case n < 9:
			h.both(counter.Change{Verb: counter.Add, Delta: []int64{1, -1}[h.rand.IntN(2)] * amount})
		default:
			h.expire(hold.ID)
		}
	}

	h.same("entries", func(s *Store) any { return entries(h.t, s, h.key) })
}

// both makes a change in both ways, and compares the answers.
func (h *sqlHistory) both(c counter.Change) {
	h.t.Helper()
	c.Key = h.key
	c.Rule = h.rules.Find(h.key)
	if c.Verb == counter.Add || c.Verb == counter.Reserve { // the SQL calls have this reason and author
		c.Reason = "order"
		c.By = "shop"
	}

	// The first way is the reference.
	want, wantErr := h.ways[0](c)
	got, err := h.ways[1](c)
	isLike := err == nil && wantErr == nil || err != nil && wantErr != nil && errors.Is(err, errors.Unwrap(wantErr))
	if got != want || !isLike {
		h.t.Fatalf("%+v %+v: %d and %v, want %d and %v", c, c.Hold, got, err, want, wantErr)
	}

	h.same(fmt.Sprintf("after %+v", c), func(s *Store) any {
		read, err := s.Read(h.t.Context(), []string{h.key})
		if err != nil {
			h.t.Fatal(err)
		}

		page, err := s.Reservations(h.t.Context(), h.key, "", 100)
		for i := range page.Open {
			page.Open[i].Until = 0
		}

		return []any{read[0].Value, read[0].Reserved, read[0].Version.Sequence, page, err}
	})
}

func (h *sqlHistory) same(what string, of func(*Store) any) {
	h.t.Helper()

	if want, is := of(h.stores[0]), of(h.stores[1]); !reflect.DeepEqual(is, want) {
		h.t.Fatalf("%s: %+v, want %+v", what, is, want)
	}
}

// expire makes a reservation due, and expires it.
func (h *sqlHistory) expire(id string) {
	for i, s := range h.stores {
		ctx := h.t.Context()
		c := connect(h.t, h.urls[i])

		const past = `update headcount_reservations set until = now() - interval '1 s' where key = $1 and id = $2 ` +
			`and status = 'open'`
		if _, err := c.Exec(ctx, past, h.key, id); err != nil {
			h.t.Fatal(err)
		}
		_ = c.Close(ctx)

		// The due reservations are expired as a gateway does it.
		due, err := s.Due(ctx)
		if err != nil {
			h.t.Fatal(err)
		}

		for j := range due {
			if r := s.Apply(ctx, []counter.Op{due[j].Expiring(h.rules)})[0]; r.Err != nil || r.Replay {
				h.t.Fatalf("%+v: %+v", due[j], r)
			}
		}
	}
}

// TestServerSQLReservationsInATransaction: until its commit a reservation belongs to its caller alone. Then subscribers
// receive it. Calls that cannot be made are refused with a code.
func TestServerSQLReservationsInATransaction(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url)
	rules := parseRules(t, stock)
	out := serve(t, s, rules)
	c := connect(t, shop(t, server, url))
	apply(t, s, once("e:one", "", rules, 3))

	err := pgx.BeginFunc(t.Context(), c, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `select headcount.reserve('e:one', 2, '10m', 'cart-7')`); err != nil {
			t.Error(err)
		}

		return errors.New("the order is not made")
	})

	if page, listErr := s.Reservations(t.Context(), "e:one", "", 10); err == nil || listErr != nil ||
		len(page.Open) > 0 {
		t.Errorf("after a rollback the reservations are %+v, %v, %v; want none", page, err, listErr)
	}

	before := time.Now()
	exec := func(sql, want string) {
		t.Helper()
		_, err := c.Exec(context.Background(), sql)
		var refused *pgconn.PgError
		isThat := want == "" && err == nil || errors.As(err, &refused) && refused.Code == want &&
			!strings.Contains(refused.Message, "\n")
		if !isThat {
			t.Errorf("%s: %v, want %q", sql, err, want)
		}
	}

	exec(`select headcount.reserve(key => 'e:one', amount => 2, "for" => '10m', id => 'cart*7', reason => 'r', `+
		`author => 'a')`, "")

	page, err := s.Reservations(t.Context(), "e:one", "", 10)
	if err != nil || len(page.Open) != 1 || page.Open[0].ID != "cart*7" || page.Open[0].Amount != 2 ||
		time.UnixMilli(page.Open[0].Until).Sub(before.Add(10*time.Minute)).Abs() > 5*time.Minute {
		t.Errorf("the reservations are %+v, %v", page, err)
	}

	testkit.Eventually(t, "watchers and webhooks hear of it", func() bool {
		for _, one := range out.counters() {
			if one.Key == "e:one" && one.Value == 1 && one.Reserved == 2 {
				return true
			}
		}

		return false
	})

	for sql, want := range map[string]string{
		`select headcount.reserve('e:one', 2, '10m', 'b')`:                       "23514",
		`select headcount.reserve('e:one', 1, '10m', 'cart*7')`:                  "55000",
		`select headcount.change('e:one', 1)`:                                    "23514", // 1 and 2 reserved, of 3
		`select headcount.commit('e:one', 'none')`:                               "P0002",
		`select headcount.reserve('views:1', 1, '10m', 'b')`:                     "22023",
		`select headcount.reserve('e:one', 1, '32d', 'b')`:                       "22023",
		`select headcount.reserve('e:one', 1, '0.9s', 'b')`:                      "22023",
		`select headcount.reserve('e:one', 1, null, 'b')`:                        "22023",
		`select headcount.reserve('e:one', 0, '1m', 'b')`:                        "22023",
		`select headcount.reserve('e:one', null, '1m', 'b')`:                     "22023",
		`select headcount.reserve('e:one', 1, '1m', '*')`:                        "22023",
		`select headcount.reserve('e:one', 1, '1m', null)`:                       "22023",
		`select headcount.reserve('e:one', 1, '1m', 'b', '')`:                    "22023",
		`select headcount.commit('e:*', 'b')`:                                    "22023",
		`select headcount.hold('cancel', 'e:one', 'b', 1, null, '', '', 'shop')`: "42501",
	} {
		exec(sql, want)
	}

	// A repeated commit changes nothing, and a cancel comes too late.
	exec(`select headcount.commit('e:one', 'cart*7')`, "")
	exec(`select headcount.commit('e:one', 'cart*7')`, "")
	exec(`select headcount.cancel('e:one', 'cart*7')`, "55000")

	if read, err := s.Read(t.Context(), []string{"e:one"}); err != nil || read[0].Value != 1 || read[0].Reserved != 0 {
		t.Errorf("the counter is %+v, %v; want 1 and nothing reserved", read, err)
	}
}
