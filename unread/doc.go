// Package unread has the words and contract of notifications. Pages change,
// users follow pages, and a user's unread count is a sum over the followed pages:
// the changes that others made and the user has not seen.
//
//	unread(user) = Σ changes(page) − own changes(user, page) − seen(user, page)
//
// So a change is one increment, however many users follow the page, and a reset
// moves seen up. Nothing is written per follower.
//
// # Levels and records
//
// The changes of a page are its level: an incarnation, the number of changes, how
// many of them had an author, and the time of the last one; besides, how many
// changes each author made. One step of the store counts a change, notes its
// author and its idempotency key, and publishes the level.
//
// What a user follows is one record: for each page, what the user has seen and
// the incarnation that belongs to. If a page's level has another incarnation, the
// store has lost changes, all or the last ones, and the user has seen no more than
// what is left of them. Redis begins a new incarnation of all levels and records
// whenever it may have lost some: else it would give versions again that had other
// contents, and gateways would take what is new for old. A record is saved only over
// the version that was read; whoever loses that race reads again (FollowService does it).
// So all rules are in Go, in one place, and two resets, or a reset and a change,
// cannot undo each other.
//
// # The way to the tabs
//
// Levels and records travel as two kinds of topic beside counts: endpoint store,
// dispatcher, push, gateway. The gateway has the records of the users who are
// connected to it and adds up. A sum that moved goes to the user's tabs with the
// counts that are due, at most once per update interval.
//
// Own changes do not show, not even for a moment. When a level has more authored
// changes than the gateway knows, the level waits until the gateway has read
// those authors, which takes one command. (A page keeps its newest eight authors
// at hand; older ones are looked up.)
//
// # Where it is kept
//
// Users are 128-bit keyed hashes. Pages are kept in the clear, since users list
// them. In Redis a change is one script of eight commands; levels are in the
// bucket of the page, records in the bucket of the user. A region keeps its own
// changes and follows; other regions do not see them.
package unread
