// Command go is a shop that sells lamps. Its stock is a counter of Headcount: it never falls below 0, so two customers
// never buy the last lamp, and every page shows it live.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"html/template"
	"log"
	"net/http"
	"os"
	"time"

	"headcount/client"
)

const (
	// the first rule that fits the key says what it is: built in, stock is exact and has the floor 0
	stock  = "stock:lamp"
	supply = 3 // lamps that the shop starts with
)

var page = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8"><title>Lamps</title><link rel="icon" href="data:,">
<script type="module" src="{{.Server}}/-/headcount.js"></script>
<h1>Lamps</h1>
<p><live-count page="lamp" singular="# person looks at this lamp" other="# people look at this lamp"></live-count></p>
<p><live-counter counter="stock:lamp">{{.Left}}</live-counter> left</p>
<form method="post" action="/orders">
<input type="hidden" name="order" value="{{.Order}}"><button>Buy</button>
</form>
`))

// shop serves the pages.
type shop struct {
	server string // the URL of Headcount
	api    *client.API
}

func main() {
	server := setting("HEADCOUNT_URL", "http://localhost:8080")
	s := &shop{server: server, api: client.NewAPI(client.Config{
		URL: server, APIKey: setting("HEADCOUNT_API_KEY", "just-to-try-it-out"),
	})}

	// A shop that is started again within a day does not get new lamps: a key makes its change once.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := s.api.Once("first delivery").Increment(ctx, stock, supply); err != nil {
		log.Fatal(err)
	}

	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.show)
	mux.HandleFunc("POST /orders", s.order)
	log.Fatal(http.ListenAndServe(setting("LISTEN", "localhost:3000"), mux))
}

// setting returns the variable of the environment, or without one its default.
func setting(name, without string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}

	return without
}

// show shows how many lamps are left. The page's own script keeps the number current.
func (s *shop) show(w http.ResponseWriter, r *http.Request) {
	left, err := s.api.Counter(r.Context(), stock)
	if err != nil {
		http.Error(w, "the stock is not known now", http.StatusServiceUnavailable)
		return
	}

	// The number of an order is made with its form, so each form is one order.
	_ = page.Execute(w, struct {
		Server, Order string
		Left          int64
	}{s.server, rand.Text(), left.Value}) // an error means that the customer is gone
}

// order sells a lamp. The order of a form has one number, so a form that is sent twice buys one lamp.
func (s *shop) order(w http.ResponseWriter, r *http.Request) {
	order := r.PostFormValue("order")
	if order == "" {
		http.Error(w, "this order has no number", http.StatusBadRequest)
		return
	}

	left, err := s.api.Once("order "+order).Decrement(r.Context(), stock, 1)

	var refused *client.Error
	isSoldOut := errors.As(err, &refused) && refused.Status == http.StatusConflict

	switch {
	case err == nil:
		fmt.Fprintf(w, "The lamp is yours. %d are left.\n", left.Value)
	case isSoldOut:
		http.Error(w, "The last lamp was sold a moment ago.", http.StatusConflict)
	default:
		// Whether the lamp was sold is not known. The same form, sent again, sells it at most once.
		http.Error(w, "Something went wrong; send the form again.", http.StatusServiceUnavailable)
	}
}
