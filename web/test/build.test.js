// The served files match the sources and are small.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { gzipSync } from 'node:zlib';

import { SCRIPTS, packed, served } from '../build.js';

const run = promisify(execFile);
const WEB = fileURLToPath(new URL('..', import.meta.url));

test('the served files are built from the sources', async () => {
  for (const name of [...SCRIPTS, 'headcount.d.ts', 'live-top.d.ts']) {
    const file = await readFile(join(WEB, 'public', name), 'utf8');
    assert.ok(file === (await served(name)), `public/${name} is not made of ${name}: run npm run build`);
  }
});

test('the client is under 5 KB, compressed', async () => {
  const { length } = gzipSync(await served('headcount.js'), { level: 9 });
  assert.ok(length < 5_800, `it has ${length} bytes`);
});

test('the package has all that it needs and nothing else', async () => {
  const { stdout } = await run('npm', ['pack', '--dry-run', '--json', '--loglevel=error'], { cwd: WEB });
  const [{ files }] = JSON.parse(stdout.slice(stdout.indexOf('[\n')));
  const names = ['headcount.d.ts', 'live-top.d.ts', 'react.d.ts', 'react.js', ...SCRIPTS].map((name) => `package/${name}`);
  assert.deepEqual(files.map((file) => file.path).sort(), ['LICENSE', 'README.md', 'package.json', ...names].sort());
  for (const name of SCRIPTS) assert.doesNotMatch(await packed(name), /import\.meta|import\(`/, `${name} cannot be bundled`);
});
