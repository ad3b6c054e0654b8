"""
The Lua scripts: each is one atomic step on the server.

A claim is one call of `acquire`: the holder as JSON, and on a second line a token of the call. A
claim waits in the line, and then is the value of the lease. So a call that lost its answer can undo
exactly what it acquired, and nothing that the same owner acquired later.

`line` holds claims by arrival time, `places` the same claims by expiry (milliseconds). To wake a
waiter, its token is published on the channel of its replica.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


_TIME = """
local function milliseconds()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function wake(prefix, replica, token)
    redis.call('PUBLISH', prefix .. ':replica:' .. replica, token)
end
"""

_LINE = f"""{_TIME}
local lease, line, places, prefix = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local function holder_of(claim)
    return string.match(claim, '^[^\\n]*')
end
local function leave(claim)
    redis.call('ZREM', line, claim)
    redis.call('ZREM', places, claim)
end
local function first()
    if redis.call('EXISTS', line) == 0 then return nil end
    for _, claim in ipairs(redis.call('ZRANGEBYSCORE', places, '-inf', milliseconds())) do
        leave(claim)
    end
    return redis.call('ZRANGE', line, 0, 0)[1]
end
local function wake_first()
    local claim = first()
    if claim then
        wake(prefix, cjson.decode(holder_of(claim))[1], string.match(claim, '[^\\n]*$'))
    end
end
"""

ACQUIRE = Script(f"""{_LINE}
-- prefix, claim, lease's ttl, place's ttl (0: do not wait), a claim of a lost replica
-- Returns nothing if the claim got the lease, otherwise the claim ahead of it and its lease's ttl.
local claim, ttl, stay, lost = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local me = holder_of(claim)
local held = redis.call('GET', lease)
if lost ~= '' then
    leave(lost)
    if held == lost then
        redis.call('DEL', lease)
        held = false
    end
end
local before = held or first()
if not before or holder_of(before) == me then
    redis.call('SET', lease, claim, 'PX', ttl)
    leave(claim)
    return false
end
if not held then wake_first() end
if stay > 0 then
    if not redis.call('ZSCORE', line, claim) then
        local last = redis.call('ZRANGE', line, -1, -1, 'WITHSCORES')[2] or 0
        local time = redis.call('TIME')
        redis.call('ZADD', line, math.max(time[1] * 1000000 + time[2], last + 1), claim)
    end
    redis.call('ZADD', places, milliseconds() + stay, claim)
    redis.call('PEXPIRE', line, stay)
    redis.call('PEXPIRE', places, stay)
else
    leave(claim)
end
return {{before, held and redis.call('PTTL', lease) or -1}}
""")

LEAVE = Script(f"""{_LINE}
-- prefix, claim
leave(ARGV[2])
if redis.call('GET', lease) == ARGV[2] then redis.call('DEL', lease) end
if redis.call('EXISTS', lease) == 0 then wake_first() end
""")

RELEASE = Script(f"""{_LINE}
-- prefix, holder, channel to notify ('' for none)
local held = redis.call('GET', lease)
if held and holder_of(held) == ARGV[2] then
    redis.call('DEL', lease)
    wake_first()
end
if ARGV[3] ~= '' then redis.call('PUBLISH', ARGV[3], '') end
""")

RENEW = Script(f"""{_LINE}
-- prefix, holder, ttl
local held = redis.call('GET', lease)
if held and holder_of(held) == ARGV[2] then return redis.call('PEXPIRE', lease, ARGV[3]) end
return 0
""")

HEARTBEAT = Script("""
local present = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
return present
""")

_APPROVAL = f"""{_TIME}
local approval, prefix = KEYS[1], ARGV[1]
local function wake_asker()
    local asker = redis.call('HMGET', approval, 'replica', 'token')
    if asker[1] then wake(prefix, asker[1], asker[2]) end
end
local function pending()
    local known = redis.call('HMGET', approval, 'deadline', 'answer')
    return known[1] and not known[2] and milliseconds() < tonumber(known[1])
end
"""

ASK = Script(f"""{_APPROVAL}
-- prefix, question, replica, token, time-out, time kept, the answer if cancelled (the second key),
-- the answer of a shutdown
local known = redis.call('HMGET', approval, 'question', 'replica', 'answer')
if known[3] and known[3] ~= ARGV[8] and known[1] == ARGV[2] and known[2] ~= ARGV[3] then
    -- Answered to a replica that was lost before it delivered the answer.
    redis.call('HSET', approval, 'replica', ARGV[3], 'token', ARGV[4])
    return known[3]
end
if pending() then wake_asker() end
redis.call('DEL', approval)
redis.call('HSET', approval, 'question', ARGV[2], 'replica', ARGV[3], 'token', ARGV[4],
    'deadline', milliseconds() + ARGV[5])
redis.call('PEXPIRE', approval, ARGV[6])
if redis.call('EXISTS', KEYS[2]) == 0 then return false end
redis.call('HSET', approval, 'answer', ARGV[7])
return ARGV[7]
""")

WITHDRAW = Script(f"""{_APPROVAL}
-- prefix, token
local known = redis.call('HMGET', approval, 'token', 'answer')
if known[1] ~= ARGV[2] or known[2] then return known[1] == ARGV[2] and known[2] end
redis.call('DEL', approval)
return false
""")

QUESTION = Script(f"""{_APPROVAL}
-- prefix
return pending() and redis.call('HMGET', approval, 'question', 'replica')
""")

RESOLVE = Script(f"""{_APPROVAL}
-- prefix, answer, token ('' for any), question ('' for any)
local known = redis.call('HMGET', approval, 'token', 'answer', 'question')
if not known[1] or ARGV[3] ~= '' and ARGV[3] ~= known[1] then return 'gone' end
if ARGV[4] ~= '' and ARGV[4] ~= known[3] then return 'gone' end
if known[2] then return 'already' end
if not pending() then return 'gone' end
redis.call('HSET', approval, 'answer', ARGV[2])
wake_asker()
return 'resolved'
""")

CANCEL = Script(f"""{_APPROVAL}
-- prefix, execution, reason, ttl, answer; the cancellation is the second key
redis.call('SET', KEYS[2], ARGV[3], 'NX', 'PX', ARGV[4])
if pending() then
    redis.call('HSET', approval, 'answer', ARGV[5])
    wake_asker()
end
redis.call('PUBLISH', prefix .. ':cancel', ARGV[2])
""")
