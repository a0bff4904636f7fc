package link_test

import (
	"context"
	"errors"
	"io"
	"strconv"
	"sync"
	"testing"
	"time"

	"headcount/counter/link"
)

// TestCloseWhilePeersAreAdded: a process that ends may still be asked for peers that it did not have before.
func TestCloseWhilePeersAreAdded(t *testing.T) {
	refuse := func(context.Context, string) (io.ReadWriteCloser, []byte, error) {
		return nil, nil, errors.New("refused")
	}
	for range 20 {
		client := link.NewClient(refuse, time.Now)
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range 2000 {
				client.To(strconv.Itoa(i))
			}
		})
		client.Close()
		wg.Wait()
	}
}
