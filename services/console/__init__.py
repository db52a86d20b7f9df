"""The console: web pages for people who operate an instance.

One process without state of its own: every page is made from calls of the public client, each with
the token of the person who looks. It may be stopped and started at any instant.

`config`    settings
`charts`    small pictures of numbers over time, as SVG
`formats`   payloads and times as texts for people
`sights`    what a token may see, so that one look serves several
`sessions`  who is logged in: sealed cookies, and the tokens of forms
`measures`  what the console measures of itself
`clients`   a client of the instance for each token
`payloads`  places for payloads, of which few are in memory at once
`live`      what a page shows of the instance, sampled while anyone looks
`guard`     what every request passes: hosts, bounds, sessions, forms, security headers
`rendering` templates, and errors as pages that say what to do
`pages`     the pages and their actions, a file for each part of the menu
`app`       which path is which page
`connections` those of browsers, and which make room for others
`service`   the process: its listener, TLS, start and end

Imports go down only: service → connections, app → pages → rendering → guard → live, payloads →
clients → sessions → formats, charts, measures, sights, config.
"""
