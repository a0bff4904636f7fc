// @ts-check
// Headcount in the browser: who is here, live.
//
//   <script type="module" src="https://headcount.example.com/-/headcount.js"></script>
//   <live-count singular="# person is reading this" other="# people are reading this"></live-count>
//   <unread-bell></unread-bell>
//   <live-counter counter="views:42"></live-counter> views <like-button counter="likes:42"></like-button>
//
// or, by hand:
//
//   import { Headcount } from 'https://headcount.example.com/-/headcount.js';
//   const headcount = new Headcount();
//   headcount.join('pricing');
//   headcount.watch(['pricing', '*'], ({ page, count }) => console.log(page, count));
//
// No dependency, no eval and no inline style, so it runs under a
// Content-Security-Policy as strict as "default-src 'self'".
//
// This file names what users import. The parts of the client are
//
//   client.js    Headcount: what this tab wants, and what is known about it
//   share.js     which of the tabs of a site has the connection
//   hub.js       that tab's part: the connection is kept up, and all tabs are served
//   link.js      one WebSocket
//   identity.js  who the user is
//   elements.js  what all elements share
//
// The build puts them into one file. What elements show, and what else only some pages need, is in other files,
// which are loaded while the connection is made, or later: live.js, bell.js, list.js, more.js and rescue.js.

export { Headcount } from './client.js';
export { LiveCount, Shell, UnreadBell, define } from './elements.js';

/** @typedef {import('./client.js').Counter} Counter */
/** @typedef {import('./client.js').CounterValue} CounterValue */
/** @typedef {import('./client.js').CounterHandle} CounterHandle */
/** @typedef {import('./client.js').State} State */
/** @typedef {import('./client.js').Options} Options */
/** @typedef {import('./identity.js').Token} Token */
