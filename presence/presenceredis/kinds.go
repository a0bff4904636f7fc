package presenceredis

import (
	"headcount/presence"
	"headcount/scripts"
	"headcount/unread"
)

// reading is one run of a script that reads the updates of topics of one kind, site and
// bucket and, unless gateway is empty, attaches it to them.
type reading struct {
	bucket  int
	publish string // PUBLISH or SPUBLISH
	gateway string
	topics  []presence.Topic
	at      []int // indexes into topics
	parts   bool  // for counts: also read the part of each region
}

// kinds has, for each kind of topic, the run that reads its updates. The reply is a list: "1" if the updates are stale,
// otherwise "0"; the bucket's generation; then for each topic "incarnation sequence value", or nothing.
var kinds = map[presence.Kind]func(s *Store, r reading) *scriptRun{
	presence.KindCount: countsRead,
	unread.KindLevel:   storedField((*keyspace).historyKey, levelField),
	unread.KindRecord:  storedField((*keyspace).recordKey, recordField),
}

// countsRead reads counts, which are sums.
func countsRead(s *Store, r reading) *scriptRun {
	site := r.topics[r.at[0]].Site
	prefix := s.at().pagePrefix(r.bucket) + site.Qualify("")
	// The script puts this head before each page to make the topics of endpoints, so no page is sent twice.
	countHead := presence.Topic{Site: site, Kind: presence.KindCount}.String() // a topic without its page

	run := &scriptRun{
		Script: scripts.Read,
		Keys: append(make([]string, 0, 3+len(r.at)),
			s.at().stateKey(r.bucket), s.at().readyKey(r.bucket), s.at().endpointsKey(r.bucket)),
		Args: []any{
			s.at().channel(r.bucket, s.cfg.Conn.DB), r.publish, s.cfg.Partitions, len(prefix), countHead, r.gateway,
			flag(r.parts),
		},
	}

	for _, i := range r.at {
		run.Keys = append(run.Keys, prefix+r.topics[i].Key)
	}

	return run
}

// storedField reads updates that are stored as they are published, in a field of a hash.
func storedField(name func(k *keyspace, bucket int, key string) string, field string) func(*Store, reading) *scriptRun {
	return func(s *Store, r reading) *scriptRun {
		run := &scriptRun{
			Script: scripts.Values,
			Keys: append(make([]string, 0, 2+len(r.at)),
				s.at().stateKey(r.bucket), s.at().endpointsKey(r.bucket)),
			Args: append(make([]any, 0, 4+len(r.at)),
				s.at().channel(r.bucket, s.cfg.Conn.DB), r.publish, r.gateway, field),
		}

		for _, i := range r.at {
			run.Keys = append(run.Keys, name(s.at(), r.bucket, r.topics[i].Name()))
			run.Args = append(run.Args, r.topics[i].String())
		}

		return run
	}
}
