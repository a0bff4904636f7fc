// What the client promises in seconds, in a real Chromium. These tests run one after the other, after all others: each
// takes off what the machine lost meanwhile.
import assert from 'node:assert/strict';
import { after, afterEach, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import Pusher from 'pusher-js';

import {
  GRACE,
  LEAVE_GRACE,
  TIMEOUT,
  eventually,
  expectCount,
  expectState,
  launch,
  open,
  record,
  recorded,
  startCable,
  startOfficeProxy,
  startSite,
  streaming,
  within,
} from './browser.js';
import { Server, program } from './server.js';

let binary;
let server;
let browser;
let office; // a proxy without WebSockets
let site; // of another origin

const embed = (url) => `<!doctype html><html lang="en"><title>Shop</title>
  <script type="module" src="${url.searchParams.get('from') ?? ''}/-/headcount.js"></script>
  <p><live-count id="count" page="${url.pathname}"></live-count> here`;

before(
  async () => {
    binary = await program();
    site = await startSite(embed);
    server = await Server.start(binary.path, ['--allow-origins', site.url, ...GRACE]);
    office = await startOfficeProxy(server.port);
    browser = await launch('--host-resolver-rules=MAP plain.example 127.0.0.1'); // plain http on the network
  },
  { timeout: 600_000 },
);

afterEach(() => Promise.all(browser.contexts().map((context) => context.close()))); // those of a test that failed

after(async () => {
  await browser?.close();
  for (const thing of [site, office]) thing?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
  }
}, { timeout: TIMEOUT });

const at = (page, base = server.url) => `${base}/?page=${page}`;

test('the network goes and comes back', async () => {
  const cable = await startCable(server.port);
  const page = await open(await browser.newContext(), at('cable', cable.url));
  await expectCount(page, 1);
  const watcher = await open(await browser.newContext(), at('cable'));
  await expectCount(watcher, 2);
  await record(watcher);

  // Back within the grace: nobody sees it.
  cable.pull();
  await page.context().setOffline(true);
  await expectState(page, 'reconnecting');
  const number = () => page.evaluate(() => {
    const span = document.getElementById('count').shadowRoot.querySelector('[part~=count]');
    return [span.textContent, span.part.contains('offline')];
  });
  await eventually('2,true', 'the last number, greyed', async () => (await number()).join());
  cable.plug();
  await page.context().setOffline(false);
  await within(3_000, 'the client is back', () => expectState(page, 'live'));
  await eventually('2,false', 'the number', async () => (await number()).join());
  await sleep(LEAVE_GRACE + 500);
  assert.deepEqual(await recorded(watcher), [2]);

  // After the grace the user is gone, and comes back as soon as the browser says that the network is back.
  cable.pull();
  await page.context().setOffline(true);
  await expectCount(watcher, 1);
  await sleep(6_000); // attempts are rare by now
  cable.plug();
  await page.context().setOffline(false);
  await within(3_000, 'the client is back', () => expectCount(watcher, 2));
  await expectCount(page, 2);
  for (const window of [page, watcher]) await window.context().close();
  cable.close();
});

test('where WebSockets are blocked a user stays with the last tab, and no longer', async () => {
  const watcher = await open(await browser.newContext(), at('tabs', office.url));
  await expectCount(watcher, 1);
  const context = await browser.newContext();
  let held;
  const one = await open(context, at('tabs', office.url), (page) => void (held = streaming(page)));
  await expectCount(watcher, 2);
  await held;
  const two = await open(context, at('tabs', office.url));
  await expectCount(two, 2);
  await record(watcher);
  held = streaming(two);
  await one.close(); // it has the connection
  await held;
  await two.reload();
  held = streaming(two);
  await expectCount(two, 2);
  await held;
  await sleep(LEAVE_GRACE + 500);
  assert.deepEqual(await recorded(watcher), [2], 'nobody sees one tab close and another reload');

  // The browser keeps the page for "back", and it joins again.
  await two.evaluate(() => addEventListener('pageshow', ({ persisted }) => (window.restored = persisted)));
  await two.goto(at('elsewhere', office.url));
  await within(12_000, 'the user is gone after the leave-grace of 6 s; a hold by PUT lasts 14 s at least', () =>
    expectCount(watcher, 1),
  );
  await two.evaluate(() => void setTimeout(() => history.back()));
  await expectCount(watcher, 2);
  assert.equal(await two.evaluate(() => window.restored), true);
  for (const each of [context, watcher.context()]) await each.close();
});

test('an ordinary restart sends no browser into the fallback', async () => {
  const restarted = await Server.start(binary.path, [...GRACE, '--shutdown-timeout', '2s']);
  try {
    const streams = [];
    const pages = await Promise.all(
      Array.from({ length: 6 }, async () =>
        open(await browser.newContext(), at('restarted', restarted.url), (page) =>
          page.on('request', (request) => request.resourceType() === 'eventsource' && streams.push(request.url())),
        ),
      ),
    );
    for (let round = 0; round < 2; round++) {
      for (const page of pages) await expectCount(page, pages.length);
      await restarted.stop();
      await restarted.run();
      // Not by connections: each page also has the stream of its <live-top>.
      await within(10_000, 'everyone is back', () =>
        eventually(pages.length, 'users', () => restarted.count('restarted')),
      );
    }
    for (const page of pages) {
      await expectCount(page, pages.length);
      await expectState(page, 'live');
    }
    assert.deepEqual(streams, [], 'nobody has an event stream');
    for (const page of pages) await page.context().close();
  } finally {
    await restarted.stop();
  }
});

test('where a Content-Security-Policy forbids WebSockets the fallback comes soon, and the console names the directive', async () => {
  let page;
  await within(20_000, 'a socket that says nothing is given up after 20 s, and this one sooner', async () => {
    page = await open(await browser.newContext(), at('strict'), (page) =>
      page.route('**/?page=strict', async (route) => {
        const answer = await route.fetch();
        await route.fulfill({
          response: answer,
          headers: { ...answer.headers(), 'content-security-policy': `connect-src ${server.url}` },
        });
      }),
    );
    await expectCount(page, 1);
  });
  assert.match(page.complaints.join('\n'), new RegExp(`add ${server.url.replace('http', 'ws')} to its connect-src`));
  await page.context().close();
});

test('the fallback notices within seconds that the server is gone', async () => {
  const cable = await startCable(server.port);
  const page = await open(
    await browser.newContext(),
    `${site.url}/gone?from=${encodeURIComponent(cable.url)}`,
    (page) =>
      page.addInitScript(() => {
        window.tries = 0;
        window.WebSocket = class extends EventTarget {
          constructor() {
            super();
            window.tries++;
            setTimeout(() => this.dispatchEvent(new Event('close')));
          }
          close() {}
        };
      }),
  );
  await expectCount(page, 1);
  const before = await page.evaluate(() => window.tries);
  cable.pull();
  await within(4_000, 'it looks for the server again', () =>
    page.waitForFunction((before) => window.tries > before, before),
  );
  cable.plug();
  const visitor = await open(await browser.newContext(), `${site.url}/gone?from=${encodeURIComponent(server.url)}`);
  await expectCount(page, 2);
  for (const window of [page, visitor]) await window.context().close();
  cable.close();
});

test('where WebSockets do not pass and tabs cannot share, six tabs are counted and the site has its connections', async () => {
  const shops = await startOfficeProxy(server.port, embed);
  try {
    const plain = shops.url.replace('127.0.0.1', 'plain.example');
    const context = await browser.newContext();
    const tabs = [];
    for (let i = 0; i < 6; i++) {
      tabs.push(await open(context, `${plain}/shop/${i}`));
      assert.equal(await tabs[i].evaluate(() => !!navigator.locks), false, 'it is no secure context');
    }
    for (let i = 0; i < 6; i++) await expectCount(tabs[i], 1);
    await sleep(10_000); // the leases, and the first renewals
    for (let i = 0; i < 6; i++) assert.equal(await server.count(`/shop/${i}`), 1, `tab ${i}`);
    // The same request to the same server under another host's name has connections of its own: it shows how fast
    // the machine is.
    const later = ([own, other]) => {
      const took = async (host) => {
        const from = performance.now();
        await fetch(`${host}/-/headcount.js`, { cache: 'no-store', mode: 'no-cors' });
        return performance.now() - from;
      };
      return Promise.all([took(own), took(other)]).then(([ours, others]) => ours - others);
    };
    for (const tab of tabs)
      for (let i = 0; i < 3; i++) {
        const late = await tab.evaluate(later, [plain, shops.url]);
        assert.ok(late <= 200, `a request of the site's own came ${late} ms later than one to another host`);
      }
  } finally {
    shops.close();
  }
});

test('clients of Pusher are back soon after a restart, and none meets a port that is closed', async () => {
  const KEY = 'key-of-the-app';
  const restarted = await Server.start(binary.path, ['--pusher-key', KEY, '--shutdown-timeout', '2s']);
  const { hostname, port } = new URL(restarted.url);
  const clients = Array.from({ length: 10 }, () => {
    const pusher = new Pusher(KEY, {
      wsHost: hostname,
      wsPort: port,
      forceTLS: false,
      enabledTransports: ['ws'],
      enableStats: false,
      cluster: '',
    });
    const client = { pusher, errors: [], count: 0 };
    pusher.connection.bind('error', (error) => client.errors.push(error.error?.data ?? error.data));
    pusher.subscribe('restart').bind('pusher:subscription_count', (data) => (client.count = data.subscription_count));
    return client;
  });
  const together = () =>
    Promise.all(clients.map((client) => eventually(clients.length, 'a client', () => client.count)));

  try {
    await together();
    await restarted.stop();
    for (const client of clients) client.count = 0;
    await restarted.run();
    await within(10_000, 'who is refused once waits for 15 s', together);
    for (const { errors } of clients) assert.equal(errors[0].code, 4100);
  } finally {
    for (const { pusher } of clients) pusher.disconnect();
    await restarted.stop();
  }
});
