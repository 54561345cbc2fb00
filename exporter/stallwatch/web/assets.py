"""Style and script of the page at `/`, and the policy that lets a browser run these two and nothing else."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1a1c1e;--soft:#565c63;--line:#c9ced4;--chip:#eceff2;--load:#c6dcf7;
--bad:#b3001b;--warn:#8a5000;--good:#1c6b32;--link:#0a4fb3}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--text:#e6e8ea;--soft:#a8b0b8;--line:#3c444c;--chip:#242a30;
--load:#1d3a5e;--bad:#ff8b8b;--warn:#f2b45c;--good:#7fd494;--link:#8fbcff}}
body{font:1rem/1.5 system-ui,sans-serif;margin:1.25rem auto;max-width:78rem;padding:0 1rem;background:var(--page);
color:var(--text)}
h1{font-size:1.4rem;margin:0}
h2{font-size:1rem;margin:0;display:inline}
#top{display:flex;flex-wrap:wrap;gap:.25rem 1rem;align-items:baseline}
#status{margin:0;flex:1 1 14rem}
button{font:inherit;padding:.2rem .7rem}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
#old{border:2px dashed var(--bad);padding:.4rem .75rem}
.soft,footer{color:var(--soft);font-size:.875rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.35rem .75rem .35rem 0;border-bottom:1px solid var(--line)}
td,th a,li,summary{overflow-wrap:anywhere}
#all th:first-child{min-width:7rem}
#all td:nth-child(4){white-space:nowrap}
#all td:nth-child(6){min-width:8rem}
#changes{margin-top:1.25rem}
td.v{padding-left:1.5em;text-indent:-1.5em}
.v::before{display:inline-block;width:1.5em;text-indent:0;font-weight:bold}
.stalled .v::before{content:"\\25A0";content:"\\25A0"/""}
.failed .v::before{content:"\\2716";content:"\\2716"/""}
.suspect .v::before,.slow .v::before{content:"\\25B2";content:"\\25B2"/""}
.unknown .v::before{content:"?";content:"?"/""}
.working .v::before,.quiet .v::before{content:"\\25B6";content:"\\25B6"/""}
.idle .v::before{content:"\\2013";content:"\\2013"/""}
.gone .v::before{content:"\\2205";content:"\\2205"/""}
.stalled .v,.failed .v{color:var(--bad);font-weight:bold}
.suspect .v,.slow .v,.unknown .v{color:var(--warn)}
.working .v,.quiet .v{color:var(--good)}
details{border-bottom:1px solid var(--line);padding:.2rem 0}
summary{padding:.35rem 0;cursor:pointer}
.scroll{overflow-x:auto}
.scroll th,.scroll td{white-space:nowrap;font-size:.875rem}
.bad{font-weight:bold;color:var(--bad)}
dl{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.2rem 1rem;margin:.3rem 0 .8rem}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
b{display:inline-block;font-weight:normal;border:1px solid var(--line);padding:0 .45rem;margin:0 .3rem .3rem 0;
background:linear-gradient(90deg,var(--load) var(--p,0%),var(--chip) 0)}
b.bad{border:2px solid var(--bad);font-weight:bold}
.p1{--p:10%}.p2{--p:20%}.p3{--p:30%}.p4{--p:40%}.p5{--p:50%}.p6{--p:60%}.p7{--p:70%}.p8{--p:80%}.p9{--p:90%}
.p10{--p:100%}
@media(max-width:40rem){
#all td:nth-child(n+3),#all th:nth-child(n+3){display:none}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.35rem}}
@media(forced-colors:active){b{background:none}}
"""

SCRIPT = """
'use strict';
(() => {
  const $ = id => document.getElementById(id), chosen = new Map();
  let paused = false, timer = 0;
  // What stays the same is left alone: focus, selection, scrolling and a screen reader's place survive a tick.
  const morph = (old, now) => {
    if (old.nodeName !== now.nodeName || (old.id || '') !== (now.id || '')) return old.replaceWith(now.cloneNode(true));
    if (old.nodeType !== 1) { if (old.data !== now.data) old.data = now.data; return; }
    const kept = name => name === 'open' && chosen.has(old.id);
    for (const {name} of [...old.attributes]) if (!now.hasAttribute(name) && !kept(name)) old.removeAttribute(name);
    for (const {name, value} of now.attributes)
      if (old.getAttribute(name) !== value && !kept(name)) old.setAttribute(name, value);
    [...now.childNodes].forEach((want, index) => {
      let have = old.childNodes[index];
      if (have && (have.id || '') !== (want.id || '')) {
        const same = want.id && [...old.children].find(child => child.id === want.id) || want.cloneNode(true);
        old.insertBefore(same, have);
        have = same;
      }
      if (have) morph(have, want); else old.append(want.cloneNode(true));
    });
    while (old.childNodes.length > now.childNodes.length) old.lastChild.remove();
  };
  const show = text => {
    const now = new DOMParser().parseFromString(text, 'text/html').getElementById('live');
    if (!now) throw new Error('the answer is no page of stallwatch');
    const focused = document.activeElement;
    morph($('live'), now);
    if (focused !== document.activeElement && focused.isConnected) focused.focus({preventScroll: true});
    const {summary, title} = $('live').dataset;
    if ($('status').textContent !== summary) $('status').textContent = summary;
    document.title = title;
    $('old').hidden = true;
  };
  const fail = why => {
    const shown = document.querySelector('#live time');
    const text = `What stands below is of ${shown ? shown.textContent : 'an unknown time'}, not of now: ${why}`;
    if ($('old').textContent !== text) $('old').textContent = text;
    $('old').hidden = false;
  };
  const look = async () => {
    clearTimeout(timer);
    if (paused || document.hidden) return;
    try {
      const answer = await fetch('live', {cache: 'no-store', signal: AbortSignal.timeout(10000)});
      const text = await answer.text();
      if (!paused) { if (answer.ok) show(text); else fail(text.trim().slice(0, 300)); }
    } catch (error) {
      fail('stallwatch does not answer');
    }
    clearTimeout(timer);
    timer = setTimeout(look, 1000 * Math.max(1, Number($('live').dataset.tick) || 5));
  };
  const unfold = () => {
    const target = location.hash && $(location.hash.slice(1));
    if (target && target.nodeName === 'DETAILS') { target.open = true; chosen.set(target.id, true); }
  };
  $('live').parentNode.addEventListener('click', event => {
    const summary = event.target.closest('summary');
    if (summary) chosen.set(summary.parentNode.id, true);
    const link = event.target.closest('a[href^="#"]');
    if (link) setTimeout(unfold);
  });
  const button = $('pause');
  button.hidden = false;
  $('still').hidden = true;
  button.addEventListener('click', () => {
    paused = !paused;
    button.textContent = paused ? 'Go on' : 'Pause';
    look();
  });
  addEventListener('hashchange', unfold);
  document.addEventListener('visibilitychange', look);
  unfold();
  timer = setTimeout(look, 1000);
})();
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hash(SCRIPT)}",
        f"style-src {_hash(STYLE)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Only these two texts, by their hashes: nothing that gets into the page by a name or a title is ever run."""
