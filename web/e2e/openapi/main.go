// Calls a server with the client that oapi-codegen has made of its /-/openapi.json.
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"

	"generated/api"
)

func main() {
	log.SetFlags(0)
	server := os.Args[1]
	ctx := context.Background()
	client, err := api.NewClientWithResponses(server,
		api.WithRequestEditorFn(func(_ context.Context, r *http.Request) error {
			r.Header.Set("X-API-Key", os.Args[2])
			return nil
		}))
	if err != nil {
		log.Fatal(err)
	}

	held, err := client.HoldUserWithResponse(ctx, "alice", "a/b", nil, api.HoldUserJSONRequestBody{})
	if err != nil || held.JSON200 == nil {
		log.Fatalf("hold: %v, %s", err, held.Body)
	}

	count, err := client.GetPageCountWithResponse(ctx, "a/b", nil)
	if err != nil || count.JSON200 == nil {
		log.Fatalf("count: %v, %s", err, count.Body)
	}

	delta := int64(3)
	added, err := client.IncrementCounterWithResponse(ctx, "views:1", nil,
		api.IncrementCounterJSONRequestBody{Delta: &delta})
	if err != nil || added.JSON200 == nil {
		log.Fatalf("increment: %v, %s", err, added.Body)
	}

	window, err := client.GetWindowWithResponse(ctx, "views:1", &api.GetWindowParams{Last: "1h"})
	if err != nil || window.JSON200 == nil {
		log.Fatalf("window: %v, %s", err, window.Body)
	}

	limit, err := client.AskLimitWithResponse(ctx, "calls", nil, api.AskLimitJSONRequestBody{Limit: 1, Window: "1h"})
	if err != nil || limit.JSON200 == nil {
		log.Fatalf("limit: %v, %s", err, limit.Body)
	}

	nobody, err := client.GetPageCountWithResponse(ctx, "-", nil)
	if err != nil || nobody.ApplicationproblemJSON400 == nil {
		log.Fatalf("no page: %v, %s", err, nobody.Body)
	}

	fmt.Println(count.JSON200.Count, added.JSON200.Value, window.JSON200.Value, limit.JSON200.Allowed,
		nobody.ApplicationproblemJSON400.Status)
}
