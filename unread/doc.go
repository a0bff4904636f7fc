// Package unread has the types and the contract of notifications. Pages change, users
// follow pages, and a user's unread count is a sum over the followed pages: the changes
// that others made and the user has not seen.
//
//	unread(user) = Σ changes(page) − own changes(user, page) − seen(user, page)
//
// So a change is one increment, however many users follow the page, and a reset raises
// seen. Nothing is written per follower.
//
// # Levels and records
//
// The level of a page counts its changes: an incarnation, the number of changes, how many of them had an author, and
// the time of the last one. In addition, the store has how many changes each author made. One operation of the store
// counts a change, records its author and its idempotency key, and publishes the level.
//
// The record of a user has the followed pages: for each one how many changes the user has
// seen, and in which incarnation of the level. If the level has another incarnation now,
// the store has lost all changes or the last ones, and the user has seen at most those that
// are left. Redis begins a new incarnation of all levels and records whenever it may have
// lost some. Otherwise it would assign lost versions again to other contents, and gateways
// would ignore the new contents as old. A record is saved only over the version that was
// read; after a conflict the writer reads again (see FollowService). So all rules are in
// Go, in one place, and two resets, or a reset and a change, cannot undo each other.
//
// # Delivery
//
// Levels and records are published as two kinds of topics, like counts: through endpoint
// store, dispatcher and push to the gateway. The gateway has the records of its connected
// users and computes the sums. A changed sum goes to the user's browser tabs together with
// the counts that are due, at most once per update interval.
//
// A user's own changes never appear in the sum, not even for a moment. If a level has more
// changes with an author than the gateway knows, the gateway first reads these authors,
// which takes one command, and only then applies the level. (A page keeps its newest eight
// authors with its level; older ones are looked up.)
//
// # Storage
//
// Users are 128-bit keyed hashes. Pages are stored in the clear, since users list them. In
// Redis a change is one script of eight commands; levels are in the bucket of the page,
// records in the bucket of the user. Changes and follows are not replicated to other
// regions.
package unread
