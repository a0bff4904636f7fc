// One visitor is one visitor, in a real Chromium: at the first visit, without cookies, in frames, over reloads and
// restarts, and when the user changes.
import assert from 'node:assert/strict';
import { createHmac } from 'node:crypto';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, afterEach, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import { build } from 'esbuild';

import { asPackage } from '../build.js';
import {
  GRACE,
  LEAVE_GRACE,
  TIMEOUT,
  eventually,
  expectCount,
  launch,
  launchBare,
  open,
  record,
  recorded,
  startHome,
  startSite,
} from './browser.js';
import { Server, program } from './server.js';
import { startTLS } from './tls.js';

/** How many browsers visit for the first time, and so many at a time. */
const BROWSERS = Number(process.env.HEADCOUNT_BROWSERS ?? 8);
const AT_A_TIME = 4;

const RULES = {
  rules: [
    { match: 'likes:*', kind: 'members', public: ['read', 'member'] },
    { match: 'visitors:*', kind: 'unique', public: ['read', 'member'] },
  ],
};
const SECRET = 'a secret of thirty-two bytes, or more';

let binary;
let folder; // of files for the servers
let server;
let guarded; // it demands tokens
let browser;
let site; // of another origin
let home; // of the server's own origin

/** A page that changes counters while it is loaded. */
const eager = (url) => `<!doctype html><html lang="en"><title>Shop</title>
  <live-count id="count" page="/first"></live-count>
  <script type="module">
    import { Headcount } from '${url.searchParams.get('from') ?? ''}/-/headcount.js';
    const { shared } = Headcount;
    const name = '${url.searchParams.get('name')}';
    // A busy machine answers late, and all these browsers have one address, whose first changes are limited.
    const again = ({ name, status }) => name === 'TimeoutError' || status === 429;
    const add = async (key) => {
      try {
        return await shared.counter(key).add();
      } catch (error) {
        if (!again(error)) throw error;
        await new Promise((later) => setTimeout(later, 500 + 1_000 * Math.random()));
        return add(key);
      }
    };
    const calls = ['visitors', 'likes'].flatMap((kind) => [add(kind + ':' + name), add(kind + ':' + name)]);
    window.changed = Promise.all(calls).then(() => true, String);
  </script>`;

const framing = (url) =>
  `<!doctype html><html lang="en"><title>Around</title><iframe src="${url.searchParams.get('from')}/%2Fframed/widget"></iframe>`;

const embed = (url) => `<!doctype html><html lang="en"><title>Shop</title>
  <script type="module" src="${url.searchParams.get('from') ?? ''}/-/headcount.js"></script>
  <live-count id="count" page="${url.pathname}"></live-count>`;

/** A page whose script tag says what its name is made of, and which may have a canonical address. */
const named = ({ searchParams: asked }) => `<!doctype html><html lang="en"><title>Shop</title>
  ${asked.has('canonical') ? `<link rel="canonical" href="${asked.get('canonical')}">` : ''}
  <script type="module" src="${asked.get('from')}/-/headcount.js" ${asked.has('of') ? `data-page-from="${asked.get('of')}"` : ''}></script>
  <live-count id="count"></live-count>`;

let bundle; // of a React application
const application = () =>
  `<!doctype html><body><script type="module">${bundle.replaceAll('</script', '<\\/script')}</script>`;

before(
  async () => {
    binary = await program();
    site = await startSite((url) =>
      (({ '/eager': eager, '/framing': framing, '/app': application, '/named': named })[url.pathname] ?? embed)(url),
    );
    folder = await mkdtemp(join(tmpdir(), 'headcount-identity-'));
    const rules = join(folder, 'rules.json');
    await writeFile(rules, JSON.stringify(RULES));
    server = await Server.start(binary.path, [
      '--counters',
      rules,
      '--allow-origins',
      site.url,
      ...GRACE,
      '--shutdown-timeout',
      '2s',
    ]);
    guarded = await Server.start(binary.path, [
      '--counters',
      rules,
      '--allow-origins',
      site.url,
      '--api-key',
      'a key that is long enough',
      '--jwt-secret',
      SECRET,
      ...GRACE,
      '--shutdown-timeout',
      '2s',
    ]);
    home = await startHome(server.port, (url) => (url.pathname === '/home/eager' ? eager : embed)(url));
    browser = await launch('--host-resolver-rules=MAP plain.example 127.0.0.1'); // plain http on the network
  },
  { timeout: 600_000 },
);

afterEach(() => Promise.all(browser.contexts().map((context) => context.close()))); // those of a test that failed

after(async () => {
  await browser?.close();
  site?.close();
  home?.close();
  try {
    await server?.stop();
    await guarded?.stop();
  } finally {
    await binary?.remove();
    if (folder) await rm(folder, { recursive: true });
  }
}, { timeout: TIMEOUT });

/** The value of a counter that lasts. */
const value = async (key) =>
  (await (await fetch(`${server.url}/api/v1/counters/${encodeURIComponent(key)}`)).json()).value;

for (const [where, address] of [
  ['on another origin', () => `${site.url}/eager?name=other&from=${encodeURIComponent(server.url)}`],
  ['on its own origin', () => `${home.url}/eager?name=own`],
])
  test(`the first visit of each browser is one visitor, ${where}`, async () => {
    const name = new URL(address()).searchParams.get('name');
    const visit = async (context) => {
      const page = await open(context, address());
      assert.equal(await page.evaluate(() => window.changed), true);
      await page.waitForFunction(() => document.getElementById('count').count > 0);
      assert.deepEqual(
        page.complaints.filter((words) => /WebSocket/.test(words)),
        [],
        'by WebSocket, as most visitors come',
      );
      await page.close();
    };
    for (let begun = 0; begun < BROWSERS; begun += AT_A_TIME)
      await Promise.all(
        Array.from({ length: Math.min(AT_A_TIME, BROWSERS - begun) }, async () => {
          const context = await browser.newContext();
          await Promise.all([visit(context), visit(context)]); // two tabs at once
          await visit(context);
          await context.close();
        }),
      );
    assert.equal(await value(`likes:${name}`), BROWSERS, 'likes');
    const visitors = await value(`visitors:${name}`);
    // it is an estimate
    assert.ok(Math.abs(visitors - BROWSERS) <= BROWSERS / 50, `${visitors} visitors of ${BROWSERS}`);
  });

/** Somebody else on a page, who records what others see of it. */
async function watching(page) {
  const watcher = await open(await browser.newContext(), `${site.url}${page}?from=${encodeURIComponent(server.url)}`);
  await expectCount(watcher, 1);
  return watcher;
}

test('a framed widget of another site is one visitor over reloads, reconnects and restarts', async () => {
  const kept = await Server.start(binary.path, (port) => [
    '--data-dir',
    join(folder, `${port}`),
    '--trusted-proxies',
    '127.0.0.1/32',
    '--allow-origins',
    site.url,
    ...GRACE,
    '--shutdown-timeout',
    '2s',
  ]);
  const tls = await startTLS(kept.port);
  try {
    const page = await open(
      await browser.newContext({ ignoreHTTPSErrors: true }),
      `${site.url}/framing?from=${encodeURIComponent(tls.url)}`,
    );
    const watcher = await open(await browser.newContext(), `${site.url}/framed?from=${encodeURIComponent(kept.url)}`);
    await expectCount(watcher, 2);
    await record(watcher);
    await page.reload();
    const count = () =>
      page
        .frames()[1]
        ?.evaluate(() => document.querySelector('live-count').count)
        .catch(() => undefined);
    await eventually(2, 'the widget shows', count);
    await kept.stop();
    await kept.run();
    await page
      .frames()[1]
      .waitForFunction(
        () => !document.querySelector('live-count').shadowRoot.querySelector('[part~=stale], [part~=offline]'),
      );
    await sleep(LEAVE_GRACE + 1_000);
    assert.equal(await kept.count('/framed'), 2);
    assert.deepEqual(await recorded(watcher), [2]);
  } finally {
    tls.close();
    await kept.stop();
  }
});

test('who forbids cookies and storage is one visitor over reconnects, on the own origin, too', async () => {
  const profile = await mkdtemp(join(tmpdir(), 'headcount-bare-'));
  const bare = await launchBare(profile);
  try {
    const watcher = await watching('/home/bare');
    const sockets = [];
    const page = await open(bare, `${home.url}/bare`, async (page) =>
      page.on('websocket', (socket) => sockets.push(socket)),
    );
    await expectCount(watcher, 2);
    await assert.rejects(
      page.evaluate(() => localStorage.length),
      /denied/,
    );
    assert.deepEqual(await bare.cookies(), []);
    await record(watcher);
    // there and back
    for (const type of ['pagehide', 'pageshow']) await page.evaluate((type) => dispatchEvent(new Event(type)), type);
    await eventually(2, 'the client has connected again', () => sockets.length);
    await page.evaluate(async () => {
      const { Headcount } = await import('/-/headcount.js');
      await Promise.all([1, 2].map(() => Headcount.shared.counter('likes:bare').add()));
    });
    await sleep(LEAVE_GRACE + 1_000);
    assert.deepEqual(await recorded(watcher), [2]);
    assert.equal(await value('likes:bare'), 1);
  } finally {
    await bare.close();
    await rm(profile, { recursive: true, force: true });
  }
});

test('an element that is put back in a later task leaves nothing, and one that is gone leaves soon', async () => {
  const watcher = await watching('/permanent');
  const page = await open(await browser.newContext(), `${site.url}/permanent?from=${encodeURIComponent(server.url)}`);
  await expectCount(watcher, 2);
  await record(watcher);
  await page.evaluate(async () => {
    const element = document.getElementById('count');
    for (let i = 0; i < 3; i++) {
      element.remove();
      await new Promise((later) => setTimeout(later, 500));
      document.body.append(element);
      await new Promise((later) => setTimeout(later, 500));
    }
  });
  await expectCount(page, 2);
  assert.deepEqual(await recorded(watcher), [2]);
  await page.evaluate(() => document.getElementById('count').remove());
  await expectCount(watcher, 1); // by a leave, as the connection is open
});

test('who consents to storage later stays the same visitor', async () => {
  for (const [where, address] of [
    ['elsewhere', `${site.url}/home/consent?from=${encodeURIComponent(server.url)}`],
    ['at home', `${home.url}/consent`],
  ]) {
    const page = await open(await browser.newContext(), address, async (page) => {
      await page.addInitScript(() =>
        document.addEventListener('readystatechange', () =>
          document.getElementById('count')?.setAttribute('storage', 'none'),
        ),
      );
    });
    await expectCount(page, 1);
    assert.deepEqual(await page.context().cookies(), [], where);
    await record(page);
    await page.evaluate(() => document.getElementById('count').removeAttribute('storage'));
    await expectCount(page, 1);
    await sleep(LEAVE_GRACE + 1_000);
    assert.deepEqual(await recorded(page), [1], where);
    await page.reload();
    await expectCount(page, 1);
    assert.equal(await server.count('/home/consent'), 1, where);
    await page.context().close();
    await eventually(0, where, () => server.count('/home/consent'));
  }
});

test('a page is named after what its site says, and a router in the fragment moves it', async () => {
  const from = encodeURIComponent(server.url);
  for (const [query, name] of [
    [`?p=1&from=${from}#/a`, '/named'],
    [`?of=hash&from=${from}#/a`, '/named#/a'],
    [`?p=123&of=query:p&from=${from}#/a`, '/named?p=123'],
    [`?canonical=/named/real%3Fid=7&id=7&from=${from}`, '/named/real?id=7'],
    [`?of=url&from=${from}#/a`, `/named?of=url&from=${from}`],
  ]) {
    const page = await open(await browser.newContext(), `${site.url}/named${query}`);
    await expectCount(page, 1);
    const decoded = decodeURI(name);
    assert.equal(await server.count(decoded), 1, query);
    if (query.startsWith('?of=hash')) {
      await page.evaluate(() => (location.hash = '#/b'));
      await eventually(1, 'the visitor has moved', () => server.count('/named#/b'));
    }
    await page.context().close();
    await eventually(0, 'the visitor has left', () => server.count('*'));
  }
});

test('any one sign that a page is back wakes it, and ends its pause', async () => {
  const watcher = await watching('/back');
  const sent = [];
  const page = await open(
    await browser.newContext(),
    `${site.url}/back?from=${encodeURIComponent(server.url)}`,
    async (page) => {
      page.on('websocket', (socket) => socket.on('framesent', ({ payload }) => sent.push(JSON.parse(payload).type)));
      await page.addInitScript(() => {
        window.away = false;
        Object.defineProperty(document, 'hidden', { get: () => window.away });
      });
    },
  );
  const event = (away, target, type) => page.evaluate(([away, target, type]) => {
    window.away = away;
    window[target].dispatchEvent(new Event(type));
  }, [away, target, type]);
  for (const [target, type] of [['window', 'focus'], ['document', 'resume'], ['window', 'pageshow']]) {
    await expectCount(watcher, 2);
    sent.length = 0;
    await event(true, 'window', 'visibilitychange');
    await eventually(true, 'the page is paused', async () => sent.includes('pause'));
    const leave = await server.hold('/back');
    await expectCount(watcher, 3);
    await event(false, target, type);
    await expectCount(page, 3);
    await leave();

    await event(false, 'window', 'pagehide');
    await expectCount(watcher, 1);
    await event(false, target, type);
    await expectCount(page, 2);
  }
});

/** A token of a user. */
function token(sub) {
  const base64 = (value) => Buffer.from(JSON.stringify(value)).toString('base64url');
  const unsigned = `${base64({ alg: 'HS256' })}.${base64({ sub })}`;
  return `${unsigned}.${createHmac('sha256', SECRET).update(unsigned).digest('base64url')}`;
}

const APP = `
import { createElement as h, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { Headcount } from './headcount.js';
import { useCount, useCounter, useUnread } from './react.js';

const asked = new URL(location).searchParams;
const token = async () => localStorage.token ?? '';
Headcount.defaults = { server: asked.get('from'), token };
localStorage.token ??= asked.get('token');

function App() {
  const [user, setUser] = useState('ann');
  const { count } = useCount('app');
  const { mine } = useCounter('likes:app');
  const { count: unread } = useUnread();
  window.login = (name, given) => {
    localStorage.token = given;
    setUser(name);
    Headcount.shared.token = token;
  };
  window.logout = () => {
    delete localStorage.token;
    Headcount.shared.close();
  };
  window.back = () => Headcount.shared.open();
  return h('main', null, h('p', { id: 'text' }, [user, count, mine, unread].join(' ')), h('like-button', { counter: 'likes:app', id: 'like' }));
}
createRoot(document.body.appendChild(document.createElement('div'))).render(h(App));
`;

test('in a React application the user changes without a reload, and nothing of the first one stays', async () => {
  const { outputFiles } = await build({
    stdin: { contents: APP, resolveDir: fileURLToPath(new URL('..', import.meta.url)) },
    bundle: true, write: false, format: 'esm', define: { 'process.env.NODE_ENV': '"production"' }, plugins: [asPackage],
  });
  const call = (path, method = 'GET', user = undefined) =>
    fetch(guarded.url + path, {
      method,
      headers: user ? { Authorization: `Bearer ${token(user)}` } : { 'X-API-Key': 'a key that is long enough' },
    });
  await call('/-/me/follows/news', 'PUT', 'ann');
  await call('/news/changes', 'POST');
  await call('/api/v1/counters/likes%3Aapp/members/me', 'PUT', 'ann');

  bundle = outputFiles[0].text;
  const page = await open(
    await browser.newContext(),
    `${site.url}/app?${new URLSearchParams({ from: guarded.url, token: token('ann') })}`,
  );
  const text = () => page.evaluate(() => document.getElementById('text')?.textContent);
  const pressed = () =>
    page.evaluate(() =>
      document.getElementById('like').shadowRoot.querySelector('button')?.getAttribute('aria-pressed'),
    );
  const online = async (user) => (await (await call(`/-/users/${user}`)).json()).online;
  await eventually('ann 1 true 1', 'the application shows', text);
  await page.evaluate((bob) => login('bob', bob), token('bob'));
  await eventually('bob 1 false 0', 'the application shows', text);
  await eventually('false', 'the button is pressed', pressed);
  await eventually(false, 'ann is online', () => online('ann'));
  await eventually(true, 'bob is online', () => online('bob'));

  await page.evaluate(() => logout());
  await eventually(false, 'bob is online', () => online('bob'));
  await page.evaluate((ann) => login('ann', ann), token('ann'));
  await page.evaluate(() => back());
  await eventually('ann 1 true 1', 'the application shows', text);
  await eventually('true', 'the button is pressed', pressed);

  for (const which of [0, 1]) {
    const tab = await open(page.context(), page.url());
    await tab.waitForFunction(() => document.getElementById('text')?.textContent === 'ann 1 true 1');
    await [page, tab][which].evaluate(() => logout()); // the first one has the connection
    await eventually(false, `ann is online after the log-out in one of two tabs, ${which}`, () => online('ann'));
    await tab.close();
    await page.evaluate((ann) => login('ann', ann), token('ann'));
    await page.evaluate(() => back());
    await eventually('ann 1 true 1', 'the application shows', text);
  }
});
