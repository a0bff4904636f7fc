package pgstore

import (
	"context"
	"strconv"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/counter/pgtest"
)

// BenchmarkClients is 64 clients of one exact counter and of many, against a
// plain UPDATE for each change from 64 connections. All commits wait for the disk.
func BenchmarkClients(b *testing.B) {
	const clients = 64
	server := pgtest.Start(b, "fsync=on", "shared_buffers=256MB")
	run := func(b *testing.B, do func(i int) error) {
		b.ResetTimer()
		var wg sync.WaitGroup
		for c := range clients {
			wg.Go(func() {
				for i := c; i < b.N; i += clients {
					if err := do(i); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "changes/s")
	}
	b.Run("floor", func(b *testing.B) {
		cfg, err := pgxpool.ParseConfig(server.Database(b))
		if err != nil {
			b.Fatal(err)
		}
		cfg.MaxConns, cfg.MinConns = clients, clients
		pool, err := pgxpool.NewWithConfig(b.Context(), cfg)
		if err != nil {
			b.Fatal(err)
		}
		defer pool.Close()
		if _, err := pool.Exec(b.Context(), "create table plain (key text primary key, value bigint not null) with (fillfactor = 50)"); err != nil {
			b.Fatal(err)
		}
		if _, err := pool.Exec(b.Context(), "insert into plain values ('e:0', 0)"); err != nil {
			b.Fatal(err)
		}
		run(b, func(int) error {
			_, err := pool.Exec(context.Background(), "update plain set value = value + 1 where key = $1", "e:0")
			return err
		})
	})
	for _, keys := range []int{1, 1000} {
		b.Run("exact/keys="+strconv.Itoa(keys), func(b *testing.B) {
			s := open(b, server.Database(b))
			c := counter.NewCombiner(s, counter.CombinerConfig{})
			defer c.Close()
			run(b, func(i int) error {
				return c.Do(context.Background(), with("", add("e:"+strconv.Itoa(i%keys), 1))).Err
			})
		})
	}
}
