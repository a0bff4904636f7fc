package api

import (
	"net/http"
	"slices"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
)

// Calls returns the calls of the API.
func (a *API) Calls() []calls.Call {
	return slices.Concat(a.presenceCalls(), a.followCalls(), a.serverCalls(), a.backendCalls())
}

// presenceCalls returns the calls about the users that are present.
func (a *API) presenceCalls() []calls.Call {
	return []calls.Call{
		{ID: "getPageCount", Method: http.MethodGet, Path: "/{page}/counter", Do: a.getCounter,
			Who: calls.Anyone, Takes: "regions explain ifnonematch", Gives: "Count 304", Refuses: "401 429 503",
			Does: "How many are on a page now. A browser, which asks for HTML, gets a small page."},
		{ID: "putPageCount", Method: http.MethodPut, Path: "/{page}/counter", Do: a.putCounter,
			Who: calls.Visitor, Body: "Action", Gives: "Count", Refuses: "401 413 429 503",
			Does: `"I am here" (increment): a hold that lasts three times --presence-timeout, or until decrement.`},
		{ID: "getPageStats", Method: http.MethodGet, Path: "/{page}/stats", Do: a.getStats,
			Who: calls.Anyone, Takes: "lastday step format", Gives: "Stats text/csv", Refuses: "401 404 429 503",
			Does: "What a page remembers of the time before now."},
		{ID: "getPageBadge", Method: http.MethodGet, Path: "/{page}/badge.svg", Do: a.getBadge,
			Who: calls.Anyone, Takes: "label color background", Gives: "image/svg+xml", Refuses: "401 503",
			Does: "The count as a picture."},
		{ID: "getPageWidget", Method: http.MethodGet, Path: "/{page}/widget", Do: a.getWidget,
			Who: calls.Anyone, Takes: "label color background watch", Gives: "text/html", Refuses: "401 503",
			Does: "The count as a page for a frame."},
		{ID: "getPageCounts", Method: http.MethodGet, Path: "/-/counters", Do: a.getCounters,
			Who: calls.Anyone, Takes: "pages", Gives: "Counts", Refuses: "401 503",
			Does: "How many are on each of several pages now, in the order asked."},
		{ID: "holdUser", Method: http.MethodPut, Path: "/-/users/{user}/pages/{page}", Do: a.putPresence,
			Who: calls.Server, Body: "Empty?", Gives: "Count", Refuses: "401 413 429 503",
			Does: "A server says that a user is here: a hold, as by PUT of the counter."},
		{ID: "releaseUser", Method: http.MethodDelete, Path: "/-/users/{user}/pages/{page}", Do: a.deletePresence,
			Who: calls.Server, Gives: "Count", Refuses: "401 429 503",
			Does: "A server says that a user is gone: it ends the hold."},
		{ID: "getUsers", Method: http.MethodGet, Path: "/-/users", Do: a.getUsers,
			Who: calls.Server, Takes: "users", Gives: "Users", Refuses: "401 503",
			Does: "Whether users are here, in this region."},
		{ID: "getUser", Method: http.MethodGet, Path: "/-/users/{user}", Do: a.getUser,
			Who: calls.Server, Gives: "User", Refuses: "401 503",
			Does: "Whether one user is here, in this region."},
		{ID: "getCounterBadge", Method: http.MethodGet, Path: counterapi.Root + "/{key}/badge.svg",
			Do:  a.getCounterBadge,
			Who: calls.Opened, Takes: "label color background", Gives: "image/svg+xml", Refuses: "401 503",
			Does: "The value as a picture, where the rule lets everybody read."},
	}
}

// followCalls returns the calls of follows and unread changes, for users themselves and for servers.
func (a *API) followCalls() []calls.Call {
	return []calls.Call{
		{ID: "notifyFollowers", Method: http.MethodPost, Path: "/{page}/changes", Do: a.postChange,
			Who: calls.Server, Takes: "idempotency", Body: "Change?", Gives: "204", Refuses: "401 413 503",
			Does: "The page was modified: its followers have one more unread."},
		{ID: "listMyFollows", Method: http.MethodGet, Path: "/-/me/follows", Do: a.getFollows,
			Who: calls.Visitor, Takes: "after", Gives: "Follows", Refuses: "401 503",
			Does: "The pages that the caller follows, and how many changes of each the caller has not seen."},
		{ID: "addMyFollow", Method: http.MethodPut, Path: "/-/me/follows/{page}", Do: a.putFollow,
			Who: calls.Visitor, Body: "Empty?", Gives: "204", Refuses: "401 413 429 503",
			Does: "The caller follows a page from now on."},
		{ID: "removeMyFollow", Method: http.MethodDelete, Path: "/-/me/follows/{page}", Do: a.deleteFollow,
			Who: calls.Visitor, Gives: "204", Refuses: "401 503",
			Does: "The caller follows a page no more."},
		{ID: "getMyUnread", Method: http.MethodGet, Path: "/-/me/unread", Do: a.getUnread,
			Who: calls.Visitor, Takes: "back", Gives: "Unread", Refuses: "401 503",
			Does: "How many changes the caller has not seen."},
		{ID: "resetMyUnread", Method: http.MethodPut, Path: "/-/me/unread", Do: a.putUnread,
			Who: calls.Visitor, Body: "ResetUnread", Gives: "Unread", Refuses: "401 413 429 503",
			Does: "The caller has seen everything, or the changes of one page."},
		{ID: "listMyNotifications", Method: http.MethodGet, Path: "/-/me/notifications", Do: a.getNotifications,
			Who: calls.Visitor, Gives: "Notifications", Refuses: "401 503",
			Does: "The pages with changes that the caller has not seen, the newest 50."},
		{ID: "readMyNotification", Method: http.MethodDelete, Path: "/-/me/notifications/{page}",
			Do: a.deleteNotification, Who: calls.Visitor, Gives: "204", Refuses: "401 503",
			Does: "The caller has seen the changes of a page."},
		{ID: "listUserNotifications", Method: http.MethodGet, Path: "/-/users/{user}/notifications",
			Do: a.getNotifications, Who: calls.Server, Gives: "Notifications", Refuses: "401 503",
			Does: "The pages with changes that a user has not seen, the newest 50."},
		{ID: "readUserNotification", Method: http.MethodDelete, Path: "/-/users/{user}/notifications/{page}",
			Do: a.deleteNotification, Who: calls.Server, Gives: "204", Refuses: "401 503",
			Does: "A user has seen the changes of a page."},
		{ID: "listUserFollows", Method: http.MethodGet, Path: "/-/users/{user}/follows", Do: a.getFollows,
			Who: calls.Server, Takes: "after", Gives: "Follows", Refuses: "401 503",
			Does: "The pages that a user follows, and how many changes of each the user has not seen."},
		{ID: "addUserFollow", Method: http.MethodPut, Path: "/-/users/{user}/follows/{page}", Do: a.putFollow,
			Who: calls.Server, Body: "Empty?", Gives: "204", Refuses: "401 413 503",
			Does: "A user follows a page from now on."},
		{ID: "removeUserFollow", Method: http.MethodDelete, Path: "/-/users/{user}/follows/{page}",
			Do: a.deleteFollow, Who: calls.Server, Gives: "204", Refuses: "401 503",
			Does: "A user follows a page no more."},
		{ID: "getUserUnread", Method: http.MethodGet, Path: "/-/users/{user}/unread", Do: a.getUnread,
			Who: calls.Server, Gives: "Unread", Refuses: "401 503",
			Does: "How many changes a user has not seen."},
		{ID: "resetUserUnread", Method: http.MethodPut, Path: "/-/users/{user}/unread", Do: a.putUnread,
			Who: calls.Server, Body: "ResetUnread", Gives: "Unread", Refuses: "401 413 503",
			Does: "A user has seen everything, or the changes of one page."},
	}
}

// serverCalls returns the calls about the server itself, and about the data of a person.
func (a *API) serverCalls() []calls.Call {
	return []calls.Call{
		{ID: "eraseMe", Method: http.MethodDelete, Path: "/-/me", Do: a.deleteMe,
			Who: calls.Visitor, Gives: "204", Refuses: "401 429 503",
			Does: "Erases what is kept of the caller: follows, what is unread, and memberships that the caller " +
				"may end."},
		{ID: "eraseUser", Method: http.MethodDelete, Path: "/-/users/{user}", Do: a.deleteUser,
			Who: calls.Server, Gives: "204", Refuses: "401 503",
			Does: "Erases what is kept of a user: follows, what is unread, when the user was last here, and " +
				"all memberships."},
		{ID: "getDemo", Method: http.MethodGet, Path: "/", Do: a.file(demoFile),
			Who: calls.Anyone, Gives: "text/html", Refuses: "401",
			Does: "The demo page."},
		{ID: "getScript", Method: http.MethodGet, Path: "/-/headcount.js", Do: a.file(scriptFile),
			Who: calls.Anyone, Gives: "text/javascript", Refuses: "401",
			Does: "The browser client."},
		{ID: "getOpenAPI", Method: http.MethodGet, Path: "/-/openapi.json", Do: a.getOpenAPI,
			Who: calls.Anyone, Gives: "Document", Refuses: "401",
			Does: "This document."},
		{ID: "getAsyncAPI", Method: http.MethodGet, Path: "/-/asyncapi.json", Do: a.getAsyncAPI,
			Who: calls.Anyone, Gives: "Document", Refuses: "401",
			Does: "The frames and events."},
		{ID: "getSites", Method: http.MethodGet, Path: sitesPath, Do: a.getSites,
			Who: calls.Server, Gives: "Sites", Refuses: "401 503",
			Does: "The sites that the API key holds for, with their totals."},
		{ID: "getDashboard", Method: http.MethodGet, Path: "/-/dashboard", Do: a.getDashboard(),
			Who: calls.Viewer, Gives: "text/html", Refuses: "401",
			Does: "The dashboard's page."},
		{ID: "getDashboardAccess", Method: http.MethodGet, Path: "/-/dashboard/access", Do: a.getDashboardAccess,
			Who: calls.Anyone, Gives: "Access", Refuses: "401",
			Does: "Whether the dashboard, and the list of /-/top/events, need an API key."},
		{ID: "getDashboardData", Method: http.MethodGet, Path: "/-/dashboard/data", Do: a.getDashboardData,
			Who: calls.Viewer, Gives: "Dashboard", Refuses: "401 503",
			Does: "What the dashboard shows."},
	}
}
