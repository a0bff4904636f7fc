package owner_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter/owner"
	"headcount/internal/rows/rowsmem"
)

// TestReleaseInDoubt: a partition is given up while its owner does not know whether a commit was made. The caller is
// sent to the next owner, and whatever the store answers later, the former owner does not own the partition again.
func TestReleaseInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &losing{Store: rowsmem.New(rowsmem.Config{})}
		o := begin(t, "a", store)
		defer o.Close()

		store.silent.Store(true)
		answered := make(chan error, 1)
		go func() {
			_, err := o.Do(t.Context(), owner.Call{Partition: 0, Ops: increment("k")})
			answered <- err
		}()
		time.Sleep(time.Second)

		if err := o.Release(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		if err := <-answered; !errors.Is(err, owner.ErrNotOwner) {
			t.Errorf("the caller got %v, want ErrNotOwner", err)
		}

		store.silent.Store(false)
		time.Sleep(time.Minute)
		if o.Owns(0) {
			t.Error("the owner owns the partition again that it gave up")
		}
	})
}

// TestAStreamInUseIsKept: a repetition changes nothing, even if the first call of its stream was so long ago that only
// the later calls keep the stream from being forgotten.
func TestAStreamInUseIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := begin(t, "a", rowsmem.New(rowsmem.Config{}))
		defer o.Close()
		call := func(number uint64, repeated bool) int64 {
			t.Helper()
			answer, err := o.Do(t.Context(), owner.Call{
				Partition: 0, Stream: "s", Number: number, Repeated: repeated, Ops: increment("k"),
			})
			if err != nil {
				t.Fatal(err)
			}

			return answer.Results[0].Counters[0].Value
		}

		call(1, false)
		time.Sleep(59 * time.Minute)
		call(2, false)
		time.Sleep(10 * time.Minute)

		if is := call(2, true); is != 2 {
			t.Errorf("a repetition is answered with %d, want 2", is)
		}
		if is := call(3, false); is != 3 {
			t.Errorf("after three calls the counter is %d, want 3", is)
		}
	})
}
