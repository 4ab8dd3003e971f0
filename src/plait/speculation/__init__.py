"""Speculation: what samples are likely to say next, and how much of it is worth computing.

Enter: what samples have said, by slots and in arrays, and the seconds of steps. Leave: drafts, as many as will pay.
`pool` keeps known texts under a budget of bytes, `drafter` says what a source of drafts does and fills it with the
pool, `acceptance` learns how often draft tokens are accepted, `step_cost` what a step takes, `choice` takes the drafts
that pay, `margin` says how much they may lose, `costly` when a draft model is asked, `due` in which steps drafts are
looked for, `speculation` puts these together, `ledger` and `counts` say how it went, `probes` learn what steps take,
`kept_drafts` wait to be verified, `promise` is what recipes know, `knowledge` what of it outlasts an engine. Nothing
here changes what a sample says. May import `kernels`, `policy` and what lies below them; no torch."""
