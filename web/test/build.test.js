// The served files match the sources.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { readFile, readdir } from 'node:fs/promises';
import { join } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { SCRIPTS, SOURCES, packed, served } from '../build.js';

const run = promisify(execFile);
const WEB = fileURLToPath(new URL('..', import.meta.url));

test('the served files are built from the sources', async () => {
  for (const name of [...SCRIPTS, 'headcount.d.ts', 'live-top.d.ts']) {
    const file = await readFile(join(WEB, 'public', name), 'utf8');
    assert.ok(file === (await served(name)), `public/${name} is not made of ${name}: run npm run build`);
  }
});

test('the served files have no syntax that the oldest browsers meant do not know', async () => {
  const { transform } = await import('esbuild');
  for (const name of SCRIPTS) {
    const code = await served(name);
    const [plain, old] = await Promise.all(
      ['esnext', ['chrome100', 'firefox100', 'safari15.4']].map((target) => transform(code, { target })),
    );
    assert.equal(old.code, plain.code, name);
  }
});

test('the package has all that it needs and nothing else', async () => {
  const { stdout } = await run('npm', ['pack', '--dry-run', '--json', '--loglevel=error'], { cwd: WEB });
  const [{ files }] = JSON.parse(stdout.slice(stdout.indexOf('[\n')));
  const names = ['headcount.d.ts', 'live-top.d.ts', 'react.d.ts', 'react.js', ...SCRIPTS, ...SOURCES].map((name) => `package/${name}`);
  assert.deepEqual(files.map((file) => file.path).sort(), ['LICENSE', 'README.md', 'package.json', ...names].sort());
  for (const name of [...SCRIPTS, ...SOURCES]) assert.doesNotMatch(await packed(name), /import\.meta|import\([^']/, `${name} cannot be bundled`);
});

test('a bundle has the parts of the package in files of their own', async () => {
  const main = (await Promise.all(['client.js', 'elements.js', 'hub.js'].map(packed))).join('');
  for (const part of ['live', 'bell', 'more', 'rescue']) assert.match(main, new RegExp(`import\\('./${part}\\.js'\\)`));
});

test('each test is run by one script', async () => {
  const { scripts } = JSON.parse(await readFile(new URL('../package.json', import.meta.url), 'utf8'));
  const named = Object.values(scripts).flatMap((script) => script.match(/e2e\/[\w.-]+\.test\.js/g) ?? []);
  const files = (await readdir(new URL('../e2e', import.meta.url))).filter((name) => name.endsWith('.test.js'));
  assert.deepEqual(named.sort(), files.map((name) => `e2e/${name}`).sort());
});

test('promises in seconds are held by the script that runs last', async () => {
  const { scripts } = JSON.parse(await readFile(new URL('../package.json', import.meta.url), 'utf8'));
  const folder = new URL('../e2e/', import.meta.url);
  for (const name of await readdir(folder)) {
    if (!name.endsWith('.test.js') || scripts['test:clock'].includes(`e2e/${name}`)) continue;
    assert.doesNotMatch(
      await readFile(new URL(name, folder), 'utf8'),
      /\bwithin\([A-Z\d]/,
      `${name} promises seconds, but does not run in test:clock`,
    );
  }
});
