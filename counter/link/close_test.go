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
	client := link.NewClient(refuse, time.Now)
	for i := range 20_000 { // so that Close takes a while
		client.To(strconv.Itoa(i))
	}

	var wg sync.WaitGroup
	closed := make(chan struct{})
	begun := make(chan struct{})
	wg.Go(func() {
		close(begun)
		for i := 0; ; i++ {
			select {
			case <-closed:
				return
			default:
				client.To("new " + strconv.Itoa(i))
			}
		}
	})

	<-begun
	client.Close()
	close(closed)
	wg.Wait()
}
