// What the elements show and say, and where they count, in a real Chromium: sentences,
// pages that scripts change, proxies and frames that are in the way, privacy.
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { after, before, test } from 'node:test';

import {
  TIMEOUT,
  eventually,
  expectCount,
  forAll,
  launch,
  open as openIn,
  startOfficeProxy,
  startSite,
} from './browser.js';
import { RIGHT, startNginx } from './nginx.js';
import { Server, program } from './server.js';

const KEY = 'a key for tests alone';

let binary;
let server;
let browser;
let office; // a proxy without WebSockets
let site; // of another origin, allowed: serves what the address asks for
let guarded; // the same under a strict policy
let nginx;

before(
  async () => {
    binary = await program();
    const html = (url) => `<!doctype html><html lang="${url.searchParams.get('lang') ?? 'en'}"><title>Shop</title>
      <script type="module" src="${url.searchParams.get('from') ?? server.url}/-/headcount.js"></script>
      <p id="words">${url.searchParams.get('html') ?? '<live-count id="count"></live-count>'}</p>`;
    site = await startSite(html);
    guarded = await startSite(html, () => {
      const all = [server.url, office.url].join(' ');
      return {
        'Content-Security-Policy': `default-src 'none'; script-src ${all}; connect-src ${all} ${all.replaceAll('http', 'ws')}; require-trusted-types-for 'script'; trusted-types 'none'`,
      };
    });
    server = await Server.start(binary.path, [
      '--allow-origins',
      `${site.url},${guarded.url}`,
      '--shutdown-timeout',
      '2s',
      '--api-key',
      KEY,
    ]);
    office = await startOfficeProxy(server.port);
    nginx = await startNginx(server.port, {
      wrong: { upgrade: true },
      blocked: {},
      right: RIGHT,
      slow: { host: RIGHT.host },
    });
    browser = await launch();
  },
  { timeout: 600_000 },
);

after(async () => {
  await browser?.close();
  for (const thing of [site, guarded, office]) thing?.close();
  await nginx?.close();
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
  }
}, { timeout: TIMEOUT });

/** A new person's window. */
const open = async (address, prepare = undefined, options = {}) =>
  openIn(await browser.newContext(options), address, prepare);
const address = (html, { path = '/', ...more } = {}) => `${site.url}${path}?${new URLSearchParams({ html, ...more })}`;
const close = (...pages) => Promise.all(pages.map((page) => page.context().close()));

/** What a reader of the page sees of an element. */
const words = (page, id = 'count') =>
  page.evaluate((id) => {
    const shown = document.getElementById(id).shadowRoot?.childNodes ?? [];
    return [...shown].map((node) => (node.hidden ? '' : node.textContent)).join('');
  }, id);
const expectWords = (page, want, id) => eventually(want, 'the element shows', () => words(page, id));

/** Waits until an element has what it shows in it. */
const drawn = (page, id = 'count') => page.waitForFunction((id) => document.getElementById(id).shadowRoot, id);

/** All live regions of a page, with those in shadows. */
const regions = (page) =>
  page.evaluate(() => {
    const within = (root) =>
      [...root.querySelectorAll('*')].flatMap((node) => [
        ...(node.matches('[role=status],[aria-live]') ? [node] : []),
        ...(node.shadowRoot ? within(node.shadowRoot) : []),
      ]);
    return within(document).map((region) => [...region.children].map((line) => line.textContent));
  });

/** A page whose server is the test: say() sends a frame, counts of pages with the next version. */
async function played(html, { clock, ...options } = {}) {
  let socket;
  let version = 0;
  const page = await open(address(html, options), async (page) => {
    if (clock) await page.clock.install();
    await page.routeWebSocket(/\/-\/ws/, (to) => {
      socket = to;
      socket.send(JSON.stringify({ type: 'welcome', user: 'u', heartbeat_ms: 600_000 }));
    });
  });
  await eventually(true, 'it connects', () => socket !== undefined);
  await drawn(page);
  page.say = (count, name = '/', more = {}) =>
    socket.send(
      JSON.stringify({ type: 'count', page: name, count, updated_at: null, version: `1-${++version}`, ...more }),
    );
  return page;
}

test('the element writes the sentence in the language around it, and nothing when nothing is to be said', async () => {
  const sentence = 'one="# person is reading" other="# people are reading"';
  const page = await played(`<live-count id="count" ${sentence}></live-count>`);
  assert.equal(await page.innerText('#words'), '');
  assert.equal(await words(page), '', 'no dash, no words');
  page.say(1);
  await expectWords(page, '1 person is reading');
  page.say(1_234);
  await expectWords(page, '1,234 people are reading');
  await page.setViewportSize({ width: 390, height: 700 });
  await expectWords(page, '1.2K people are reading');

  const display = () => page.evaluate(() => getComputedStyle(document.getElementById('count')).display);
  await page.evaluate(() => document.getElementById('count').setAttribute('min', '5'));
  await expectWords(page, '1.2K people are reading');
  page.say(4);
  await expectWords(page, '');
  assert.equal(await display(), 'none');
  assert.equal(await page.evaluate(() => document.getElementById('count').count), 4, 'scripts know it');
  page.say(5);
  await expectWords(page, '5 people are reading');
  assert.equal(await display(), 'inline');

  // By the plural of the page's language.
  const polish = await played(
    '<live-count id="count" one="# osoba" few="# osoby" many="# osób" other="# osoby"></live-count>',
    { lang: 'pl' },
  );
  for (const [count, want] of [[1, '1 osoba'], [3, '3 osoby'], [5, '5 osób']]) {
    polish.say(count);
    await expectWords(polish, want);
  }
  const silent = await open(address(`<live-count id="count" ${sentence}></live-count>`), undefined, {
    javaScriptEnabled: false,
  });
  assert.equal(await silent.innerText('#words'), '');

  // By that of the element around it, in shadow roots, too.
  const inPolish = '<live-count one="# osoba" few="# osoby" other="# osób"></live-count>';
  const inside = (html) => `<div><template shadowrootmode="open">${html}</template></div>`;
  const nested = await played(
    `<live-count id="count"></live-count>${inside(inside(inPolish))}<div lang="en">${inside(inPolish)}</div>`,
    { lang: 'pl' },
  );
  nested.say(3);
  const said = () => nested.evaluate(() => {
    const find = (root) =>
      [...root.querySelectorAll('*')].flatMap((node) =>
        node.matches('live-count') ? [node] : node.shadowRoot ? find(node.shadowRoot) : [],
      );
    return find(document)
      .slice(1)
      .map((element) => [...element.shadowRoot.childNodes].map((node) => node.textContent).join(''))
      .join();
  });
  await eventually('3 osoby,3 osób', 'the sentences are', said);
  await close(page, polish, silent, nested);
});

test('a screen reader hears the sentence from one region, however many elements there are', async () => {
  const names = ['a', 'b', 'c', 'd', 'e'];
  const page = await played(
    '<live-count id="count" one="# person is reading" other="# people are reading"></live-count><unread-bell></unread-bell>' +
      names.map((name) => `<live-count id="${name}" page="${name}" watch></live-count>`).join(''),
  );
  page.say(1);
  for (const name of names) page.say(3, name);
  await expectWords(page, '1 person is reading');
  for (const name of names) await expectWords(page, '3', name);
  assert.deepEqual(await regions(page), [[]], 'what was there first is read in its place');
  for (const name of names) page.say(4, name);
  await expectWords(page, '4', 'e');
  page.say(2);
  await expectWords(page, '2 people are reading');
  assert.deepEqual(
    await regions(page),
    [['2 people are reading']],
    'numbers of other pages mean nothing without words',
  );
  assert.equal(
    await page.evaluate(() => document.querySelector('[role=status]').getAttribute('role')),
    'status',
    'politely',
  );
  await close(page);
});

test('the region speaks at most once a minute, and not for announce="off"', async () => {
  const page = await played(
    '<live-count id="count"></live-count><live-count id="off" page="off" announce="off"></live-count>',
    { clock: true },
  );
  for (const name of ['/', 'off']) page.say(1, name);
  await expectWords(page, '1', 'off');
  const heard = async (count) => {
    for (const name of ['/', 'off']) page.say(count, name);
    await expectWords(page, `${count}`, 'off');
    return regions(page);
  };
  await page.clock.pauseAt(await page.evaluate(() => Date.now() + 1_000)); // else it goes on by itself, too
  assert.deepEqual(await heard(2), [['2 here now']], 'after a silence at once');
  let count = 3;
  for (let seconds = 5; seconds < 60; seconds += 5) {
    await page.clock.fastForward(5_000);
    const [words] = await heard(count++);
    assert.ok(words.length === 0 || words[0] === '2 here now', `after ${seconds} s: ${words}`);
  }
  await page.clock.fastForward(60_000);
  assert.deepEqual(await regions(page), [[`${count - 1} here now`]], 'then the newest');
  await page.evaluate(() => document.getElementById('count').setAttribute('announce', 'off'));
  await page.clock.fastForward(60_000);
  assert.deepEqual(await heard(14), [[]], 'silence');
  await close(page);
});

const looks = (page, id) =>
  page.evaluate((id) => {
    const number = document.getElementById(id).shadowRoot?.querySelector('[part~=count]');
    return (
      number &&
      `${number.textContent} ${getComputedStyle(number).textDecorationLine} ${number.closest('button')?.disabled}`
    );
  }, id);

test('an element that cannot show its counter is struck out, and the console says what to do', async () => {
  const page = await open(
    address(
      '<like-button id="votes" key="votes:x"></like-button><live-counter id="keyless"></live-counter><like-button id="bare"></like-button><like-button id="likes" key="likes:x"></like-button>',
      { path: '/wrong' },
    ),
  );
  await eventually('0 none false', 'a right one is', () => looks(page, 'likes'));
  for (const [id, want] of Object.entries({
    votes: '– line-through true',
    keyless: '– line-through undefined',
    bare: '– line-through true',
  }))
    await eventually(want, `${id} is`, () => looks(page, id));
  for (const words of [
    /<like-button counter="votes:x"> needs a counter of the kind members, .*sum.*<live-counter>/,
    /<live-counter> has no counter; .*counter="/,
    /<like-button> has no counter; .*counter="/,
  ])
    assert.ok(
      page.complaints.some((text) => words.test(text)),
      page.complaints.join('\n'),
    );
  assert.equal(page.complaints.length, 3);
  // What was put right is shown.
  await page.evaluate(() => document.getElementById('keyless').setAttribute('key', 'likes:x'));
  await eventually('0 none undefined', 'the counter is', () => looks(page, 'keyless'));
  await close(page);

  // What is beyond the bound of what a page may watch says so once.
  const watched = Array.from(
    { length: 100 },
    (_, i) => `<live-count ${i ? '' : 'id="first"'} page="w${i}" watch></live-count>`,
  ).join('');
  const full = await open(
    address(
      `${watched}<live-count id="beyond" page="beyond" watch></live-count><live-count page="beyond" watch></live-count><live-counter id="counter" key="votes:x"></live-counter>`,
      { path: '/many' },
    ),
  );
  await eventually('0 none undefined', 'one within the bound is', () => looks(full, 'first'));
  for (const id of ['beyond', 'counter'])
    await eventually('– line-through undefined', `${id} is`, () => looks(full, id));
  assert.equal(full.complaints.length, 1, full.complaints.join('\n'));
  assert.match(full.complaints[0], /more than 100 pages and counters.*fewer elements/);
  await close(full);
});

test('a stale count looks different, and the console says what to look at', async () => {
  const page = await played('<live-count id="count"></live-count>');
  page.say(7, '/', { stale: true });
  const style = () => page.evaluate(() => {
    const { fontStyle, textDecorationLine } = getComputedStyle(
      document.getElementById('count').shadowRoot.querySelector('[part~=count]'),
    );
    return `${fontStyle} ${textDecorationLine}`;
  });
  await eventually('italic none', 'its style', style);
  page.say(8, '/', { stale: true });
  await expectWords(page, '8');
  assert.deepEqual(page.complaints.length, 1);
  assert.match(page.complaints[0], /stale.*\/readyz/);
  page.say(8);
  await eventually('normal none', 'its style', style);
  await close(page);
});

const stand = (name) => `#${createHash('sha256').update(name).digest('hex').slice(0, 32)}`;

test('an element without a page follows the address, by the Navigation API and by the wrapped history', () =>
  forAll(['Navigation API', 'wrapped history'], followsTheAddress));

async function followsTheAddress(how) {
  const root = how.startsWith('N') ? '/one' : '/two';
  const at = (name) => server.count(root + name);
  const page = await open(address('<live-count id="count"></live-count>', { path: `${root}/a` }), (page) =>
    how === 'Navigation API'
      ? undefined
      : page.addInitScript(() => Object.defineProperty(window, 'navigation', { value: undefined })),
  );
  const expectAt = (name, want = 1) => eventually(want, `on ${name}`, () => at(name));
  await expectCount(page, 1);
  assert.equal(await at('/a'), 1);
  await page.evaluate((path) => history.pushState(null, '', path), `${root}/b`);
  await expectAt('/b');
  await expectAt('/a', 0);
  await page.evaluate((path) => history.replaceState(null, '', path), `${root}/c?query=1`);
  await expectAt('/c');
  await page.evaluate(() => history.replaceState(null, '', '?query=2'));
  await page.goBack();
  await expectAt('/a');
  await expectAt('/c', 0);
  await expectCount(page, 1);

  // A canonical address counts, but not that of another page.
  await page.evaluate(
    (path) => document.head.insertAdjacentHTML('beforeend', `<link rel="canonical" href="${path}">`),
    `${root}/main`,
  );
  await expectAt('/main');
  await page.evaluate((path) => history.pushState(null, '', path), `${root}/d`);
  await expectAt('/d');
  await page.evaluate((path) => document.querySelector('link').setAttribute('href', path), `${root}/other`);
  await expectAt('/other');
  await expectAt('/d', 0);
  await page.evaluate(() => document.querySelector('link').remove());
  await expectAt('/d');

  // A long path counts under a name that anybody can compute.
  const long = `${root}/${'é'.repeat(200)}`;
  await page.evaluate((path) => history.pushState(null, '', path), long);
  await eventually(1, 'on the long one', () => server.count([...long].slice(0, 95).join('') + stand(long)));
  await expectCount(page, 1);
  assert.deepEqual(page.complaints, []);

  // One that the server refuses is said once; who is on it is on the site.
  const refused = `${root}/\u0001`;
  await page.evaluate((path) => history.pushState(null, '', path), `${root}/%01`);
  await eventually(1, 'on the site', () => server.count(stand(refused)));
  assert.equal(await page.evaluate(() => document.getElementById('count').count), undefined);
  await page.evaluate(() =>
    document.getElementById('count').insertAdjacentHTML('afterend', '<live-count></live-count>'),
  );
  await page.evaluate((path) => history.pushState(null, '', path), `${root}/e`);
  await expectAt('/e');
  assert.equal(page.complaints.length, 1, page.complaints.join());
  assert.match(page.complaints[0], /\\u0001" is not counted: .*U\+0001/);
  await close(page);
}

test('behind a proxy with a wrong Host nothing is live, and the console names the header', async () => {
  const state = (page) => page.textContent('#state');
  for (const way of ['wrong', 'blocked']) {
    const page = await open(`${nginx.urls[way]}/?page=proxied`);
    await eventually('refused', way, () => state(page));
    const hint = page.complaints.find((text) => /refuses this page/.test(text));
    assert.match(hint, /proxy_set_header Host \$http_host/, way);
    await drawn(page);
    const style = await page.evaluate(() => {
      const number = document.getElementById('count').shadowRoot.querySelector('[part~=count]');
      return [number.part.contains('refused'), getComputedStyle(number).textDecorationLine];
    });
    assert.deepEqual(style, [true, 'line-through']);
    assert.equal(await server.count('proxied'), 0);
    await close(page);
  }
  const [page, slow] = await Promise.all(['right', 'slow'].map((way) => open(`${nginx.urls[way]}/?page=proxied`)));
  for (const each of [page, slow]) {
    await expectCount(each, 2);
    assert.equal(await state(each), 'live');
  }
  assert.deepEqual(page.complaints, []);
  await close(page, slow);
});

test('a sandboxed frame is told what can be done, and one that may have its origin counts', async () => {
  const framed = (sandbox, from) => {
    const inner = address('<live-count id="count"></live-count>', { path: '/framed', from });
    return open(address(`<iframe sandbox="${sandbox}" src="${inner.replaceAll('&', '&amp;')}"></iframe>`));
  };
  const ways = [server.url, office.url];
  const alone = await Promise.all(ways.map((from) => framed('allow-scripts', from)));
  const allowed = await Promise.all(ways.map((from) => framed('allow-scripts allow-same-origin', from)));
  for (const [i, page] of alone.entries()) {
    await eventually(true, 'it is told', async () =>
      page.complaints.some((text) => /origin is null.*allow-same-origin.*postMessage/.test(text)),
    );
    const state = () =>
      page
        .frames()[1]
        .evaluate(async (from) => (await import(`${from}/-/headcount.js`)).Headcount.shared.state, ways[i]);
    await eventually('refused', 'its state', state);
  }
  for (const page of allowed)
    await eventually(2, 'both are counted', () =>
      page.frames()[1].evaluate(() => document.getElementById('count').count),
    );
  await close(...alone, ...allowed);
});

test('a widget of each of several sites is live in frames of another origin, with and without WebSockets', async () => {
  const sited = await Server.start(binary.path, [
    '--site',
    'one=http://one.test',
    '--site',
    'two=http://two.test',
    '--shutdown-timeout',
    '2s',
  ]);
  const own = await Server.start(binary.path, (port) => [
    '--site',
    `main=http://127.0.0.1:${port}`,
    '--site',
    'two=http://two.test',
    '--shutdown-timeout',
    '2s',
    '--presence-timeout',
    '2m',
  ]); // a hold lasts for three times as long: it does not end while a reader loads
  const slow = await startOfficeProxy(sited.port);
  try {
    const frame = (from, query) =>
      address(`<iframe src="${from}/w/widget?label=reading${query}"></iframe>`.replaceAll('&', '&amp;'));
    const of = (page) => page.frames()[1].evaluate(() => document.querySelector('live-count').count);
    const [first, second, other] = await Promise.all([
      open(frame(sited.url, '&site=two')),
      open(frame(slow.url, '&site=two')),
      open(frame(sited.url, '')),
    ]);
    for (const page of [first, second]) await eventually(2, 'both are on the page of their site', () => of(page));
    await eventually(1, 'the other site has one', () => of(other));
    const third = await open(frame(sited.url, '&site=two&watch=1'));
    await eventually(2, 'who watches is not counted', () => of(third));
    const title = (page) => page.frames()[1].title();
    await eventually('2 reading', 'the title is', () => title(first));
    for (const page of [first, other, third]) assert.deepEqual(page.complaints, []);
    await close(first, second, other, third);

    // On the origin of another site it only reads.
    const put = await fetch(`${own.url}/w/counter?site=two`, {
      method: 'PUT',
      headers: { 'Content-Type': 'application/json' },
      body: '{"action":"increment"}',
    });
    assert.equal(put.status, 200);
    const [reader, visitor] = await Promise.all([open(frame(own.url, '&site=two')), open(frame(own.url, ''))]);
    const text = (page) => page.frames()[1].evaluate(() => document.body.innerText.trim());
    await eventually('1 reading', 'the reader shows', () => text(reader));
    await eventually(1, 'the site of the server has one', () => of(visitor));
    const cookie = put.headers.get('Set-Cookie').split(';')[0];
    await fetch(`${own.url}/w/counter?site=two`, {
      method: 'PUT',
      headers: { 'Content-Type': 'application/json', Cookie: cookie },
      body: '{"action":"decrement"}',
    });
    await eventually('0 reading', 'the reader shows', () => text(reader));
    assert.equal(await title(reader), '0 reading');
    for (const page of [reader, visitor]) assert.deepEqual(page.complaints, []);
    await close(reader, visitor);
  } finally {
    slow.close();
    await sited.stop();
    await own.stop();
  }
});

test('the bell opens a list, which is read one by one or all, under a strict policy', async () => {
  const html = '<unread-bell id="bell"></unread-bell><button id="outside">Outside</button>';
  const at = `${guarded.url}/listed?${new URLSearchParams({ html })}`;
  const page = await open(at);
  const tab = await openIn(page.context(), at);
  const bell = (each) => each.evaluate(() => document.getElementById('bell').count);
  const unread = async (want) => {
    for (const each of [page, tab]) await eventually(want, 'the bell shows', () => bell(each));
  };
  await unread(0);
  const pages = ['list-c', 'list-b', 'list-a']; // changes of one second are listed by page
  for (const name of pages)
    await page.evaluate(
      async ([server, name]) => {
        const { Headcount } = await import(`${server}/-/headcount.js`);
        const follow = (method, path, base, token, keep, idOf) =>
          fetch(new URL(path, base), { method, headers: { 'Headcount-Id': idOf(base, keep) } });
        const answer = await Headcount.at().lend(follow, 'PUT', `-/me/follows/${name}`);
        if (!answer.ok) throw new Error(`${answer.status}`);
      },
      [server.url, name],
    );
  const change = async (name, body) => {
    const answer = await fetch(`${server.url}/${name}/changes`, {
      method: 'POST',
      headers: { 'X-API-Key': KEY, 'Content-Type': 'application/json' },
      body: JSON.stringify(body),
    });
    assert.equal(answer.status, 204);
  };
  const bodies = [{ title: 'New prices', url: '/pricing' }, { title: '<b>bold</b>' }, {}];
  for (const [i, name] of pages.entries()) {
    await change(name, bodies[i]);
    await unread(i + 1);
  }

  const button = page.getByRole('button', { name: /^Notifications/ });
  const dialog = page.getByRole('dialog', { name: 'Notifications' });
  const focused = () =>
    page.evaluate(() => document.getElementById('bell').shadowRoot.activeElement?.firstChild?.textContent);
  const expectFocus = (want) => eventually(want, 'the focus is on', focused);
  const expanded = () => button.getAttribute('aria-expanded');
  await page.evaluate(() => {
    const bell = document.getElementById('bell');
    window.told = [];
    bell.addEventListener('read', ({ detail }) => window.told.push(detail));
    bell.addEventListener('open', (event) => window.prevent && event.preventDefault());
  });
  assert.equal(await expanded(), 'false');
  await button.focus();
  await page.keyboard.press('Enter');
  await expectFocus('list-a');
  assert.equal(await expanded(), 'true');
  assert.equal(await dialog.getByRole('listitem').count(), 3);
  assert.equal(await dialog.getByRole('link', { name: /^New prices/ }).getAttribute('href'), `${guarded.url}/pricing`);
  for (const [key, want] of [
    ['ArrowDown', '<b>bold</b>'],
    ['ArrowDown', 'New prices'],
    ['Tab', 'Mark all as read'],
    ['ArrowDown', 'list-a'],
    ['ArrowUp', 'Mark all as read'],
    ['Home', 'list-a'],
    ['End', 'Mark all as read'],
  ]) {
    await page.keyboard.press(key);
    await expectFocus(want);
  }
  assert.ok((await dialog.boundingBox()).width > 50);
  await page.keyboard.press('Escape');
  await dialog.waitFor({ state: 'detached' });
  assert.equal(await expanded(), 'false');
  assert.equal(await page.evaluate(() => document.getElementById('bell').shadowRoot.activeElement?.tagName), 'BUTTON');

  // One by one; a list that is open follows, in the other tab too.
  await tab.getByRole('button', { name: /^Notifications/ }).click();
  const theirs = tab.getByRole('dialog', { name: 'Notifications' }).getByRole('listitem');
  await eventually(3, 'the other list has', () => theirs.count());
  await button.click();
  await dialog.getByRole('button', { name: /^<b>bold/ }).click();
  await unread(2);
  await eventually(2, 'the other list has', () => theirs.count());
  await page.click('#outside');
  await dialog.waitFor({ state: 'detached' });
  await page.evaluate(() => (window.prevent = true));
  await button.click();
  await page.evaluate(() => (window.prevent = false));
  assert.equal(await dialog.count(), 0, 'the page has prevented it');
  assert.deepEqual(await page.evaluate(() => window.told), ['list-b']);
  await button.click();
  await dialog.getByRole('link', { name: /^New prices/ }).click();
  await page.waitForURL(`${guarded.url}/pricing`);
  await eventually(1, 'the bell shows', () => bell(tab));
  await tab.getByRole('button', { name: 'Mark all as read' }).click();
  await eventually(0, 'the bell shows', () => bell(tab));
  await tab.getByRole('button', { name: /^Notifications/ }).click();
  await tab.getByText('Nothing new').waitFor();
  for (const each of [page, tab]) assert.deepEqual(each.complaints, []);
  await close(page);
});

test('the list of the bell stays inside the window, wherever the bell is, anchored and measured', () =>
  forAll(['anchored', 'measured'], staysInside));

async function staysInside(how) {
  const places = ['left:0', 'left:calc(50% - .6em)', 'right:0'].flatMap((x) =>
    ['top:0', 'top:50%', 'bottom:0'].map((y) => `position:fixed;${x};${y}`),
  );
  places.push('position:fixed;left:40px;top:40px;width:3em;height:3em;overflow:hidden;transform:translateX(9px)');
  const html =
    places.map((place) => `<span style="${place}"><unread-bell></unread-bell></span>`).join('') +
    '<div style="height:4000px"><p style="height:400px"></p><unread-bell id="far"></unread-bell></div>';
  const page = await open(address(html, { path: '/places' }), (page) =>
    page.addInitScript((how) => {
      if (how === 'measured') CSS.supports = () => false; // as a browser without anchor positioning says
    }, how),
  );
  await eventually(true, 'the bells are drawn', () =>
    page.evaluate(() => document.querySelector('#far')?.count === 0),
  );
  const id = await page.evaluate(
    () => Object.entries(localStorage).find(([key]) => key.startsWith('headcount_id '))[1],
  );
  const headers = { 'Headcount-Id': id, 'X-API-Key': KEY, 'Content-Type': 'application/json' };
  for (let i = 0; i < 9; i++) {
    const follow = await fetch(`${server.url}/-/me/follows/${how}-${i}`, {
      method: 'PUT',
      headers: { 'Headcount-Id': id },
    });
    const body = JSON.stringify({
      title: `Notification ${i} with a title so long that no telephone has room for all of it in one line`,
    });
    const change = await fetch(`${server.url}/${how}-${i}/changes`, { method: 'POST', headers, body });
    assert.deepEqual([follow.status, change.status], [204, 204]);
  }
  /** Where the list of a bell is, when it has loaded, and the bell itself. */
  const opened = (bell) =>
    bell.evaluate(async (bell) => {
      const root = bell.shadowRoot;
      while (root.querySelector('[part~=list]')?.getAttribute('aria-busy') !== 'false')
        await new Promise(requestAnimationFrame);
      // then the list is where it is painted
      for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
      const rect = (node) => node.getBoundingClientRect().toJSON();
      const list = root.querySelector('[part~=list]');
      const { clientWidth, clientHeight } = document.documentElement;
      const { left, top, width } = rect(list);
      // What is seen there is the list, and nothing cuts it off.
      const seen = document.elementFromPoint(left + width / 2, top + 10) === bell;
      return { list: rect(list), button: rect(root.querySelector('button')), clientWidth, clientHeight, seen };
    });
  for (const dir of ['ltr', 'rtl'])
    for (const width of [320, 375, 1280]) {
      await page.setViewportSize({ width, height: 640 });
      await page.evaluate((dir) => (document.documentElement.dir = dir), dir);
      for (const [i, place] of places.entries()) {
        const bell = page.locator('unread-bell').nth(i);
        await bell.locator('button[part=button]').click();
        const at = await opened(bell);
        const what = `${dir} ${width} ${place}: ${JSON.stringify(at)}`;
        const { list, button } = at;
        assert.ok(
          list.left >= 0 && list.right <= at.clientWidth && list.top >= 0 && list.bottom <= at.clientHeight,
          what,
        );
        assert.ok(list.width > 200 && list.height > 100 && at.seen, what);
        assert.ok(list.top >= button.bottom || list.bottom <= button.top, `${what}: it covers the bell`);
        assert.ok(list.left <= button.right && list.right >= button.left, `${what}: it is elsewhere`);
        if (width === 1280 && place.includes('50%')) {
          const edge = dir === 'ltr' ? 'right' : 'left';
          if (place.includes('left:calc'))
            assert.ok(Math.abs(list[edge] - button[edge]) < 1, `${what}: it ends where the bell ends`);
        }
        await page.keyboard.press('Escape');
      }
    }

  // It stays with its bell when the page is scrolled.
  const far = page.locator('#far');
  await far.locator('button[part=button]').click();
  const before = await opened(far);
  await page.mouse.wheel(0, 150);
  const gap = ({ list, button }) => Math.round(Math.max(list.top - button.bottom, button.top - list.bottom));
  await eventually(
    true,
    'the page is scrolled',
    async () => (await opened(far)).button.top < before.button.top - 100,
  );
  await eventually(gap(before), 'the list is beside the bell, at a distance of', async () => gap(await opened(far)));
  await close(page);
}

test('under a strict policy the sentence is written and styled, with and without WebSockets', async () => {
  const html =
    '<live-count id="count" one="# person is reading" other="# people are reading"></live-count><unread-bell id="bell"></unread-bell>';
  const at = (from) => `${guarded.url}/guarded?${new URLSearchParams({ html, from })}`;
  const [page, slow] = await Promise.all([open(at(server.url)), open(at(office.url))]);
  for (const each of [page, slow]) {
    await expectWords(each, '2 people are reading');
    await each.waitForFunction(() => document.getElementById('bell').shadowRoot?.querySelector('button'));
    assert.equal(
      await each.evaluate(() => getComputedStyle(document.querySelector('body > [role=status]')).position),
      'fixed',
    );
  }
  assert.deepEqual(page.complaints, []);
  assert.deepEqual(slow.complaints.filter((text) => /Policy/.test(text)), []);
  await close(page, slow);
});

test('with storage="none" there is neither a cookie nor storage, with and without WebSockets', async () => {
  const html = (from) =>
    `<live-count id="count" storage="none" server="${from}"></live-count><like-button storage="none" server="${from}" id="likes" key="likes:unstored"></like-button>`;
  const addresses = [
    address(html(server.url), { path: '/unstored' }),
    address(html(office.url), { path: '/unstored' }),
    // On the server's own origin, where each connection would bring a cookie.
    `${server.url}/x/counter`,
    `${office.url}/x/counter`,
  ];
  const pages = await Promise.all(
    addresses.map(async (each) => {
      const page = await open(each);
      if (each.endsWith('/x/counter'))
        await page.evaluate(async (html) => {
          document.body.innerHTML = html;
          for (const count of document.body.querySelectorAll('live-count')) count.setAttribute('page', '/unstored');
          await import('/-/headcount.js');
        }, html(''));
      return page;
    }),
  );
  await Promise.all(pages.map((page) => expectCount(page, 4)));
  for (const page of pages) {
    await eventually(true, 'it can be liked', () =>
      page.evaluate(() => document.getElementById('likes').shadowRoot?.querySelector('button')?.disabled === false),
    );
    await page.click('#likes');
  }
  for (const page of pages) await expectCount(page, 4, 'likes');
  for (const page of pages) {
    assert.deepEqual(await page.context().cookies(), []);
    assert.deepEqual(await page.evaluate(() => [localStorage.length, sessionStorage.length]), [0, 0]);
  }
  // Each tab is somebody.
  const tab = await openIn(pages[0].context(), addresses[0]);
  await expectCount(tab, 5);
  await close(...pages);
});
