package heartbeat_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	. "headcount/presence/heartbeat"
	"headcount/presence/memstore"
	"headcount/presence/node"
)

// TestBadNetworkCountsRight: the network loses, repeats and delays datagrams. A presence
// node still counts exactly those who joined and stayed.
func TestBadNetworkCountsRight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		random := rand.New(rand.NewPCG(1, 2))
		var late sync.WaitGroup
		healed := false
		n.lose = func(to string, p []byte) bool {
			if healed {
				return false
			}
			p = append([]byte(nil), p...)
			if random.IntN(3) == 0 { // once more, later; perhaps instead
				delay := time.Duration(random.IntN(400)) * time.Millisecond
				late.Go(func() {
					time.Sleep(delay)
					n.mu.Lock()
					defer n.mu.Unlock()
					select {
					case n.conns[to].in <- p:
					default:
					}
				})
			}
			return random.IntN(4) == 0
		}

		store := memstore.New(memstore.Config{})
		var nd *Transport
		own, err := node.New(store, node.Config{Name: "nd:1", Partitions: partitions, Reply: replies(func(to string, r *Reply) { nd.SendReply(to, r) })})
		if err != nil {
			t.Fatal(err)
		}
		replies := make(chan *Reply, 1<<16)
		nd, stopNode := start(t, Config{Conn: n.listen("nd:1"), Keys: secret, Name: "nd:1", Resolver: names{}, OnBeat: onBeat(func(b *Beat) { own.Deliver(b) })})
		gw, stop := start(t, Config{Conn: n.listen("gw:1"), Keys: secret, Name: "gw:1", Incarnation: 1, Resolver: names{}, OnReply: onReply(func(r *Reply) { replies <- r })})
		var all []int
		for p := range partitions {
			all = append(all, p)
		}
		own.Gateways(nil)
		own.Own(all)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = own.Run(ctx) })
		synctest.Wait()

		// All users join a page, and every fourth leaves it.
		const people = 2000
		var streams [partitions][]Op
		var users []presence.User
		for i := range people {
			u := presence.User(uint64(i+1) * 0x9E3779B97F4A7C15)
			p := u.Partition(partitions)
			streams[p] = append(streams[p], Op{Kind: Join, User: u, Page: "home"})
			if i%4 == 0 {
				streams[p] = append(streams[p], Op{Kind: Leave, User: u, Page: "home"})
			} else {
				users = append(users, u)
			}
		}
		source := Source{Gateway: "gw:1", Incarnation: 1}
		var acked [partitions]uint64
		for round := range 150 {
			n.mu.Lock()
			healed = round > 110
			n.mu.Unlock()
			for p, ops := range streams {
				if left := ops[acked[p]:]; len(left) > 0 {
					gw.SendBeat("nd:1", &Beat{Source: source, Partition: p, Stream: 1, First: acked[p] + 1, Ops: left})
				}
			}
			if round%20 == 0 {
				beat := map[int]*Beat{}
				for _, u := range users {
					p := u.Partition(partitions)
					if beat[p] == nil {
						beat[p] = &Beat{Source: source, Partition: p}
					}
					beat[p].Alive = append(beat[p].Alive, u)
				}
				for _, b := range beat {
					gw.SendBeat("nd:1", b)
				}
			}
			time.Sleep(100 * time.Millisecond)
			for range len(replies) {
				r := <-replies
				acked[r.Partition] = max(acked[r.Partition], r.Acked) // all streams are number 1; without a stream nothing is acknowledged
				for _, u := range r.Unknown {                         // too many heartbeats were lost
					streams[r.Partition] = append(streams[r.Partition], Op{Kind: Join, User: u, Page: "home"})
				}
			}
		}
		for p, ops := range streams {
			if acked[p] != uint64(len(ops)) {
				t.Errorf("partition %d: %d of %d acknowledged", p, acked[p], len(ops))
			}
		}
		counts, err := store.Counts(t.Context(), []string{"home", presence.Site})
		if err != nil || counts[0].Users != int64(len(users)) || counts[1].Users != int64(len(users)) {
			t.Errorf("%v %v, want %d", counts, err, len(users))
		}
		late.Wait()
		stop()
		time.Sleep(10 * time.Second) // the gateway is gone, and all its users with it
		if counts, err = store.Counts(t.Context(), []string{"home", presence.Site}); err != nil || counts[0].Users != 0 || counts[1].Users != 0 {
			t.Errorf("ghosts: %v %v", counts, err)
		}
		cancel()
		running.Wait()
		stopNode()
	})
}

// replies is a function as node.Replies.
type replies func(gateway string, r *Reply)

func (f replies) SendReply(gateway string, r *Reply) { f(gateway, r) }
