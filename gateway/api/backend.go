package api

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/pusher"
	"headcount/presence"
	"headcount/unread"
)

const (
	appRoot     = "/apps/{app_id}"
	maxSigned   = 128 << 10 // bytes of a body: a batch of ten events, of 10 KB each
	maxOccupied = 10_000    // channels in one answer
	pageBatch   = 256       // counts in one read of the store

	maxChannelLists = 4           // lists in progress, including requests that wait for the same list
	channelsAge     = time.Second // maximum age of a list in progress that a request waits for
)

// Pages reads all pages. A presence store implements it.
type Pages interface {
	presence.Counters
	presence.Lister
}

// backendCalls returns the calls of back ends that use a library of Pusher.
func (a *API) backendCalls() []calls.Call {
	return []calls.Call{
		{ID: "listPusherChannels", Method: http.MethodGet, Path: appRoot + "/channels", Do: a.signed(a.getChannels),
			Who: calls.Signer, Takes: "prefix info", Gives: "PusherChannels", Refuses: "401 503",
			Does: "With --pusher-secret, as in Pusher's HTTP API: the pages with somebody on them, at most 10,000."},
		{ID: "getPusherChannel", Method: http.MethodGet, Path: appRoot + "/channels/{channel}",
			Do: a.signed(a.getChannel), Who: calls.Signer, Takes: "info", Gives: "PusherChannel", Refuses: "401 503",
			Does: "The same about one page."},
		{ID: "triggerPusherEvent", Method: http.MethodPost, Path: appRoot + "/events",
			Do:  a.triggers(pusher.ParseTrigger),
			Who: calls.Signer, Takes: "md5", Body: "PusherEvent", Gives: "Empty", Refuses: "401 413 503",
			Does: "The event headcount:changed: the pages of its channels were modified. Any other is 403."},
		{ID: "triggerPusherBatch", Method: http.MethodPost, Path: appRoot + "/batch_events",
			Do: a.triggers(pusher.ParseBatch), Who: calls.Signer, Takes: "md5", Body: "PusherBatch", Gives: "Empty",
			Refuses: "401 413 503", Does: "Several such events."},
	}
}

// signed wraps the handler of a call that the app's back end must have signed; nil if the app has no secrets.
func (a *API) signed(do func(*gin.Context, pusher.Params) (calls.Answer, error)) calls.Handler {
	if len(a.cfg.App.Secrets) == 0 {
		return nil
	}

	return func(c *gin.Context) (calls.Answer, error) {
		// The signature of a HEAD request covers the method HEAD.
		url := c.Request.URL
		params, err := a.cfg.App.Open(c.Request.Method, url.EscapedPath(), url.RawQuery, time.Now())
		if err != nil {
			return calls.Answer{}, unsigned(err)
		}

		return do(c, params)
	}
}

func unsigned(err error) error { return calls.Refuse(calls.ErrNotSigned, sentence(err)) }

// occupied are the channels of a site with at least one user, in the order of their names.
type occupied struct {
	channels []presence.PageUsers
	stale    bool
}

func (o occupied) Points() int { return len(o.channels) }
func (occupied) Lacking() bool { return false }

// channelsOf identifies the channels of a site with a prefix.
type channelsOf struct {
	site   presence.Site
	prefix string
}

var errManyOccupied = calls.Bad("More than 10,000 channels are occupied; ask for fewer with filter_by_prefix.")

// getChannels answers with the channels that have users.
func (a *API) getChannels(c *gin.Context, params pusher.Params) (calls.Answer, error) {
	info, err := pusher.ParseInfo(params["info"])
	if err != nil {
		return calls.Answer{}, calls.Bad(sentence(err))
	}
	if err := a.Serving(); err != nil {
		return calls.Answer{}, Unavailable(err)
	}

	// Making the list scans the store, so equal requests share a scan.
	q := channelsOf{siteOf(c), params["filter_by_prefix"]}
	// Whoever signs is a back end, and waits for no visitor.
	by := counterapi.Asker{Server: true}
	read := func(ctx context.Context) (occupied, error) { return a.readOccupied(ctx, q) }
	found, err := a.channels.Ask(c.Request.Context(), q, channelsAge, by, read)
	switch {
	case errors.Is(err, calls.ErrBad):
		return calls.Answer{}, err
	case err != nil:
		return calls.Answer{}, storeAway(err)
	}

	return calls.PackedJSON(info.AppendChannels(nil, found.channels, found.stale)), nil
}

// readOccupied reads the channels that have users from the store.
func (a *API) readOccupied(ctx context.Context, q channelsOf) (found occupied, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()

	var names []string
	err = a.cfg.Pages.Pages(ctx, func(some []string) {
		for _, name := range some {
			site, key := presence.SplitName(name)
			// The total of a site is kept like a page, but is no channel.
			isChannel := site == q.site && key != presence.AllPages
			if isChannel && strings.HasPrefix(key, q.prefix) {
				names = append(names, name)
			}
		}
	})
	if err != nil {
		return found, err
	}

	// The store may list a page twice.
	slices.Sort(names)
	for batch := range slices.Chunk(slices.Compact(names), pageBatch) {
		if err := a.addOccupied(ctx, &found, batch); err != nil {
			return found, err
		}
	}

	return found, nil
}

// addOccupied adds the pages that have users.
func (a *API) addOccupied(ctx context.Context, found *occupied, names []string) error {
	counts, err := a.cfg.Pages.Counts(ctx, names)
	if err != nil {
		return err
	}

	for _, count := range counts {
		found.stale = found.stale || count.Stale
		if count.Users > 0 {
			channel := presence.PageUsers{Page: presence.KeyOf(count.Page), Users: count.Users}
			found.channels = append(found.channels, channel)
		}
	}
	// After each batch, so that a list which is too long is not read to its end.
	if len(found.channels) > maxOccupied {
		return errManyOccupied
	}

	return nil
}

// getChannel answers whether a channel has users.
func (a *API) getChannel(c *gin.Context, params pusher.Params) (calls.Answer, error) {
	name, err := pageInPath(c, "channel", presence.CheckPage)
	if err != nil {
		return calls.Answer{}, err
	}
	info, err := pusher.ParseInfo(params["info"])
	if err != nil {
		return calls.Answer{}, calls.Bad(sentence(err))
	}

	counts, err := a.counts(c, name)
	if err != nil {
		return calls.Answer{}, err
	}
	stale := counts[0].Stale || counts[0].Without != ""

	return calls.PackedJSON(info.AppendChannel(nil, counts[0].Users, stale)), nil
}

// triggers returns the handler of a call that reports modified pages; parse parses the body.
func (a *API) triggers(parse func(body []byte) (pages []string, err error)) calls.Handler {
	return a.signed(func(c *gin.Context, params pusher.Params) (calls.Answer, error) {
		body, err := readBody(c, maxSigned)
		if err != nil {
			return calls.Answer{}, err
		}
		// The signature covers a hash of the body, which could not be compared before.
		if err := params.CheckBody(body); err != nil {
			return calls.Answer{}, unsigned(err)
		}

		pages, err := parse(body)
		switch {
		case errors.Is(err, pusher.ErrMessage):
			return calls.Answer{}, calls.Refuse(calls.ErrNotPublic, sentence(err))
		case err != nil:
			return calls.Answer{}, calls.Bad(sentence(err))
		}

		return calls.JSON([]byte("{}")), a.changeAll(c, pages)
	})
}

// changeAll stores that pages were modified, in order. After an error, the first ones may have been stored.
func (a *API) changeAll(c *gin.Context, pages []string) error {
	return a.carryOut(c, storeTimeout, func(ctx context.Context) error {
		for _, page := range pages {
			if err := a.parts.Unread.Change(ctx, siteOf(c).Qualify(page), unread.Change{}); err != nil {
				return err
			}
		}

		return nil
	})
}
