import { Headcount } from 'headcount-web';
import { useCount, useCounter } from 'headcount-web/react';
import { createRoot } from 'react-dom/client';

Headcount.defaults = { server: 'http://localhost:8080' };

/** Counts this visitor on the page as long as the component is shown. */
function Readers({ page }) {
  const { count, stale } = useCount(page);

  // A number is undefined until it is known.
  if (count === undefined) return null;

  const text = count === 1 ? '1 person is reading this' : `${count} people are reading this`;
  return <p id="readers" style={{ opacity: stale ? 0.5 : 1 }}>{text}</p>;
}

/** A like is an element of a set, so a visitor who clicks twice has taken it back. */
function Like({ story }) {
  const { value, mine, add, remove } = useCounter(`likes:${story}`);

  return (
    <button id="like" aria-pressed={mine} onClick={mine ? remove : add}>
      {value ?? '…'} likes
    </button>
  );
}

createRoot(document.getElementById('app')).render(
  <main>
    <h1>An application in React</h1>
    <Readers page="story" />
    <Like story="story" />
  </main>,
);
