"""Good and bad expressions; a bad one with the column (of line 1) the error points at."""

GOOD = r"""
true
size > 5
size-1 == 6
size == 0x7
headers["a"] == "b"
headers['a'] == 'b'
headers.a == "b"
"b" == headers.a
headers[r"a"] == r'b\d'
headers["\x61"] == "\u0062"
headers["a"] != "b"
!(headers["a"] == "b")
!!(size == 7)
"a" in headers
!("zz" in headers)
has(headers.a)
has(headers.a) && headers.a == "b"
headers.a in ["a", "b"]
headers.a in []
size in [1, 2, 7]
headers.a.startsWith("b")
headers.a.endsWith("b")
headers.a.contains("b")
headers.a.matches("^b+$")
headers.a.matches(r"\w{1,3}")
headers.a.matches("^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")
headers.size() == 2
size(headers) >= 1
size(headers.a) == 1
headers.a.size() < 3
int(headers.n) > 5
int(headers["n"]) % 2 == 0
uint(headers.n) == 5u
double(headers.n) / 2.0 > 1.5
double(size) * 1.5 > 2.0
string(size) == "7"
string(created_at).startsWith("2")
bytes(headers.a) == b"b"
headers.a < "c"
headers.a + "x" == "bx"
created_at < received_at
created_at <= timestamp("2030-01-01T00:00:00Z")
received_at - created_at > duration("1m")
created_at + duration("1h") > received_at
created_at - duration("1h") < received_at
duration("90s") == duration("1m30s")
created_at.getFullYear() >= 2000
created_at.getMonth() == 0
created_at.getDate() == 1
created_at.getDayOfMonth() == 0
created_at.getDayOfWeek() in [0, 6]
created_at.getDayOfYear() < 200
created_at.getHours() < 12
(received_at - created_at).getMinutes() > 5
created_at.getMilliseconds() == 0
headers.exists(k, k.startsWith("x-"))
headers.all(k, headers[k] != "")
headers.exists_one(k, k == "a")
headers.filter(k, k != "a").size() == 1
headers.map(k, headers[k]).exists(v, v == "b")
headers.map(k, k != "n", headers[k]) == ["b"]
[1, 2].all(x, x < size)
size > 5 ? true : false
headers.a == "b" ? size > 1 : size > 100
type(size) == int
dyn(size) == 7
{"a": 1}["a"] == 1
[1, 2][0] == 1
1 < 1.5
size == 7 // the end
-size < 0
headers == {"a": "b"}
"é" in headers
size == 7 && (headers.a == "b" || headers.a == "c")
""".strip().split("\n")

BAD: list[tuple[int, str]] = []
for _line in r"""
12| size > 1 ||
10| (size > 1
9| size > 1)
1| siz > 5
13| headers.a > siz
1| foo(size) == 1
1| headers.a.lower() == "a"
1| headers.a.split(",") == ["a"]
1| headers.a.contains() == true
1| headers.a.contains("a", "b")
22| headers.a.startsWith(5)
1| size()
1| size(1) == 1
1| size(headers, headers) == 1
1| size
1| "x"
1| headers.a
1| headers
1| created_at
1| 1 + 1
1| null
1| size + "x" == 1
1| size + 1.0 == 2.0
1| size + 1u == 1
1| "a" * 2 == "aa"
1| headers["a"] > 5
1| headers["a"] == 5
1| 5 == headers.a
2| !headers["a"]
2| !size
1| -headers.a == 1
1| created_at == 1
1| created_at > 5
1| created_at + 1 == created_at
1| created_at + received_at == created_at
1| duration("1h") + created_at > received_at
9| headers[1] == "a"
9| headers[true] == "a"
1| headers.a.b == "a"
1| size.a == 1
1| size[0] == 1
1| headers.a[0] == "b"
9| size in headers.a
8| "a" in "abc"
1| size in headers
1| size in ["a"]
1| size ? true : false
19| size > 1 ? true : 1
13| size > 1 && size
1| headers.a || true
19| headers.a.matches("[")
19| headers.a.matches("(?=a)")
19| headers.a.matches(r"\w{100}")
19| headers.a.matches(r"(\w{8}){9}")
38| headers.exists(k, headers[k].matches("a"))
19| headers.a.matches(headers.b)
14| created_at > timestamp("yesterday")
14| created_at > timestamp(0)
28| received_at - created_at > duration("x")
28| received_at - created_at > duration("99999999999h")
1| int("x") == 1
1| int(created_at) == 1
1| bool("true")
1| string(true) == "true"
5| has(size)
12| has(headers["a"])
9| [1].all(1, true)
12| [1].all(x, x)
15| [1].exists(x, y == 1)
1| size.exists(x, true)
1| headers.all(k, v, v == "")
12| [1].exists(size, true)
37| headers.exists(a, headers.exists(b, a == b))
12| [1].map(x, [x, x]).size() == 1
1| created_at.getHours("UTC") == 1
1| getFullYear(created_at) == 1
1| .size == 7
1| headers{} == headers
9| headers.in == "a"
1| if
1| "abc
1| "\d" == "d"
3| r"\" == "a"
4| [1,] == [1]
1| 99999999999999999999 == size
1| headers?.a == "b"
1| [1] < [2]
4| 1 .. 2
2| {1.5: 2} == {}
1| timestamp == size
1| matches("a", "a")
1| 1 < 2 < 3
1| optional.none() == 1
1| [1].all(., true)
""".strip().split("\n"):
    _column, _source = _line.split("| ", 1)
    BAD.append((int(_column), _source))
