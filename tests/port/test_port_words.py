"""Pasted text becomes the words of commands."""

import pytest

from phalanx.errors import ConfigError
from phalanx.port.old_command import is_old_command, read_old_command
from phalanx.port.shell_text import read_text_lines, read_words


def words(text):
    return [list(line.words) for line in read_text_lines(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python a.py \\\n  --b 1", [["python", "a.py", "--b", "1"]]),
        ("python a.py \\  \n --b", [["python", "a.py", "--b"]]),  # a space after the backslash
        ("python a.py --b 'x y' --c=\"z $V\"", [["python", "a.py", "--b", "x y", "--c=z $V"]]),
        ('poprun --args="-x A \\\n -x B" python', [["poprun", "--args=-x A  -x B", "python"]]),
        ("# hello\npython a.py # why\n", [["python", "a.py"]]),
        ("python a.py && python b.py; python c.py", [["python", f"{n}.py"] for n in "abc"]),
        ("$ python a.py", [["python", "a.py"]]),
        ("python a.py --x#1", [["python", "a.py", "--x#1"]]),
        ("python a.py --p <path to data>", [["python", "a.py", "--p", "<path", "to", "data>"]]),
        ("python a.py\r\npython b.py", [["python", "a.py"], ["python", "b.py"]]),
    ],
)
def test_text_is_split_as_a_shell_does(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("python a.py [...]", ("[...]",)),
        ("python a.py --x 1 [--help]", ("[--help]",)),
        ("python a.py 2>&1 | tee log.txt", ("2>&1", "| tee log.txt")),
        ("python a.py > log.txt", ("> log.txt",)),
        ("python a.py &", ("&",)),
        ("python a.py &> log.txt", ("&> log.txt",)),
    ],
)
def test_what_belongs_to_the_shell_or_is_to_be_filled_in_is_left_out(text, left_out):
    (line,) = read_text_lines(text)
    assert line.left_out == left_out
    assert line.words[:2] == ("python", "a.py")


def test_exports_hold_for_the_commands_after_them():
    text = "python a.py\nexport A=1 B='x y'\npython b.py\nC=3\nD=4 python c.py"
    lines = read_text_lines(text)
    assert [line.environment for line in lines] == [
        {},
        {"A": "1", "B": "x y"},
        {"A": "1", "B": "x y", "C": "3"},
    ]
    assert [line.line for line in lines] == [1, 3, 5]
    assert lines[2].words == ("D=4", "python", "c.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B=16\npython a.py --b $B --c=${B}", ["python", "a.py", "--b", "16", "--c=16"]),
        ("export D=/d\npython a.py --d $D/x", ["python", "a.py", "--d", "/d/x"]),
        ("D=/d; E=$D/e; python a.py $E", ["python", "a.py", "/d/e"]),
        ("$ B=16\n$ python a.py $B", ["python", "a.py", "16"]),
        ("F=' --b 1 --c'\npython a.py $F 2", ["python", "a.py", "--b", "1", "--c", "2"]),
        ("F='x y'\npython a.py \"$F\" '$F' \"\\$F\"", ["python", "a.py", "x y", "$F", "$F"]),
        ("python a.py ${PHALANX_NO_SUCH:-4}", ["python", "a.py", "4"]),
        ("B=1 python a.py $B $C ${C}", ["B=1", "python", "a.py", "$B", "$C", "${C}"]),
        ("python a.py $(date +%s) `date +%s`", ["python", "a.py", "$(date +%s)", "`date +%s`"]),
        ('D="$(cd "$(dirname "$0")" && pwd)"\npython a.py $D/x',
         ["python", "a.py", '$(cd "$(dirname "$0")" && pwd)/x']),
    ],
)  # fmt: skip
def test_variables_that_the_text_sets_are_filled_in(text, expected):
    assert words(text) == [expected]


def test_a_variable_that_runs_a_command_is_not_run_again_for_each_command():
    (line,) = read_text_lines("OUT=$(python a.py | tail -1)\nN=1\npython b.py --out $OUT")
    assert line.words == ("python", "b.py", "--out", "$(python a.py | tail -1)")
    assert line.environment == {"N": "1"}


def test_brackets_and_single_ampersands_end_commands():
    text = "(cd x && python a.py --b 1) & python b.py --c 'd)' &\npython c.py"
    assert words(text) == [
        ["python", "a.py", "--b", "1"],
        ["python", "b.py", "--c", "d)"],
        ["python", "c.py"],
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("python a.py --b 'x", "line 1, column 17"),
        ('python a.py \\\n --b "x y', "line 2, column 6"),
    ],
)
def test_a_quote_that_is_not_closed_is_located(text, where):
    with pytest.raises(ConfigError, match=f"^{where}: the quote that begins .* is not closed"):
        read_text_lines(text)


def test_separate_words_are_taken_as_they_are():
    (line,) = read_words(["python", "a.py", "--b", "x y; # z"])
    assert line.words == ("python", "a.py", "--b", "x y; # z")
    assert read_words(["python a.py --b 1"])[0].words == ("python", "a.py", "--b", "1")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("1 2 3", "1 2 3"),
        ("{1..3}", "1 2 3"),
        ("{6..2..2}", "6 4 2"),
        ("$(seq 1 3)", "1 2 3"),
        ("`seq 2`", "1 2"),
        ("$(seq 4 -2 0)", "4 2 0"),
        ("$SEEDS 9", "7 8 9"),
        ("$(cat seeds.txt)", "$s"),  # not known
        ("configs/*.yml", "$s"),
    ],
)
@pytest.mark.parametrize("body", ["; do {}; done", "\ndo\n  {}\ndone\n", "; do {}; done &"])
def test_a_loop_over_known_values_is_unrolled(values, expected, body):
    text = 'SEEDS="7 8"; (for s in ' + values + body.format("python a.py --seed $s") + ")\nb.py"
    *loop, last = words(text)
    assert " ".join(line[-1] for line in loop) == expected
    assert last == ["b.py"]


def test_loops_may_be_nested():
    text = "for m in a b; do for s in 1 2; do python $m.py --seed $s; done; done"
    assert [line[1:] for line in words(text)] == [
        [f"{m}.py", "--seed", s] for m in "ab" for s in "12"
    ]


def test_other_loops_are_read_once():
    text = "while true; do python a.py; done\nfor ((i=0;i<3;i++)); do python b.py --seed $i; done"
    found = [line for line in words(text) if line[0] == "python"]
    assert found == [["python", "a.py"], ["python", "b.py", "--seed", "$i"]]


@pytest.mark.parametrize("body", ["python a.py;", ""])
@pytest.mark.parametrize("values", ["{1..99999}", "$(seq 1 5000)"])
def test_a_loop_of_very_many_rounds_is_refused(values, body):
    with pytest.raises(ConfigError, match="line 1: loops of more than 1,000 rounds are not"):
        words(f"for a in {values}; do for b in {values}; do {body} done; done")


def test_a_long_script_without_loops_is_read():
    assert len(words("echo 1\n" * 2000)) == 2000


@pytest.mark.parametrize(
    "value",
    ["{01..03}", "{a,b}", "{a..c}", "run{1..3}", "$(seq 12-3)", f"{{1..{'9' * 5000}}}",
     f"$(seq {'1' * 3000}x)", "$(seq 1 2 3 4)"],
)  # fmt: skip
def test_values_that_are_not_known_are_left_as_they_are(value):
    assert words(f"for s in {value}; do python a.py $s; done") == [["python", "a.py", "$s"]]


@pytest.mark.parametrize("end", ["; done", " & done", "\ndone"])
def test_a_loop_may_run_subshells(end):
    found = words(f"for g in 0 1; do (A=$g python a.py $g){end}\nb.py")
    assert [line for line in found if "b.py" in line or "python" in line] == [
        ["A=0", "python", "a.py", "0"],
        ["A=1", "python", "a.py", "1"],
        ["b.py"],
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat > x <<EOF\ndon't\nEOF\npython a.py", [["cat"], ["python", "a.py"]]),
        ("cat <<-'E' > x; python b.py\n\tit's\n\tE\npython a.py",
         [["cat"], ["python", "b.py"], ["python", "a.py"]]),
        ("sbatch <<'EOF'\npython a.py\nEOF", [["sbatch"], ["python", "a.py"], ["EOF"]]),
        ("cat <<END-OF-NOTE\ndon't\nEND-OF-NOTE\na.py", [["cat"], ["a.py"]]),
        ('cat <<"END OF"\nit\'s\nEND OF\na.py', [["cat"], ["a.py"]]),
        ("/bin/bash <<EOF\na.py\nEOF", [["/bin/bash"], ["a.py"], ["EOF"]]),
        ("cat <<EOF | sbatch\na.py\nEOF", [["cat"], ["a.py"], ["EOF"]]),
        ("cat > run.sh <<EOF\nc.py\nEOF\na.py", [["cat"], ["a.py"]]),
        ("let N=1<<3\na.py", [["let", "N=1<<3"], ["a.py"]]),
        ("a.py x+=y", [["a.py", "x+=y"]]),
        ("@for s in 1 2; do a.py $s; done", [["a.py", "1"], ["a.py", "2"]]),
        ("CMD " + "[" * 100_000 + "]", [["CMD", "[" * 100_000 + "]"]]),
        ("python a.py --b 1 `# why` --c", [["python", "a.py", "--b", "1", "--c"]]),
        ("A='--b 1'\nA+=' --c'\npython a.py $A", [["python", "a.py", "--b", "1", "--c"]]),
        ("all:\n\t@python a.py\n\t-python b.py",
         [["all:"], ["python", "a.py"], ["python", "b.py"]]),
        ('CMD ["python", "a.py", "x y"]', [["python", "a.py", "x y"]]),
        ('python a.py "$@"', [["python", "a.py"]]),
    ],
)  # fmt: skip
def test_files_around_commands_are_understood(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\nif [ x ]; then A=2; fi\npython a.py --a $A", ["--a", "$A"]),
        ("A=1\nif x; then A=2; else if y; then A=3; fi; fi\npython a.py --a $A", ["--a", "$A"]),
        ("if x; then A=2; python a.py --a $A; fi", ["--a", "2"]),
        ("A=1\nif x; then A=2; else python a.py --a $A; fi", ["--a", "1"]),
        ("A=1\n[ x ] && A=2 || A=3\npython a.py --a ${A:-4}", ["--a", "${A:-4}"]),
        ("A=1\n[ x ] && { A=2; B=3; }\npython a.py --a $B", ["--a", "$B"]),
        ("A=1\n[ x ] && A=2 && python a.py --a $A", ["--a", "2"]),
        ("cd x && A=2 && B=3 && python a.py --a $A$B", ["--a", "23"]),
        ("cd x && A=2\npython a.py --a $A", ["--a", "2"]),
        ("case x in\n a|b) A=2 ;;\n *) A=3; python a.py --a $A ;;\nesac", ["--a", "3"]),
        ("A=1\ncase x in a) A=2 ;; esac\npython a.py --a $A", ["--a", "$A"]),
        ("A=1\n[ x ] && A+=2\npython a.py --a $A", ["--a", "$A"]),
        ("A=1\nif x; then A=2; fi\nA=4\npython a.py --a $A", ["--a", "4"]),
        ("A=0\nwhile x; do\n python a.py --a $A\n A=$((A+1))\ndone", ["--a", "$A"]),
        ("A=0\nuntil x; do python a.py --a $A; ((A++)); done", ["--a", "$A"]),
        ("A=0\nfor x in *.yml; do python a.py --a $A; A+=1; done", ["--a", "$A"]),
        ("A=4\nwhile x; do python a.py --x=1 --a $A; B=1; done", ["--a", "4"]),
        ("readonly A=1\ndeclare -i B=2\npython a.py --a $A$B", ["--a", "12"]),
        ("A=1\nwhile x; do A=2; done\npython a.py --a $A", ["--a", "$A"]),
        ("for x in *.yml; do A=2; done\npython a.py --a ${A:-4}", ["--a", "${A:-4}"]),
        ("for B in *.yml; do echo; done; B+=2\npython a.py --a $B", ["--a", "${B}2"]),
        ("A=1\nwhile x; do for y in 1 2; do z; done; python a.py --a $A; A=2; done", ["--a", "$A"]),
        ("if x; then for A in 1 2; do y; done; fi\npython a.py --a $A", ["--a", "$A"]),
        ("A=1\nwhile x; do A=2; done; if y; then A=3; else python a.py --a ${A:-4}; fi",
         ["--a", "${A:-4}"]),
        ("A=1\n[ x ] || A=2 && python a.py --a $A", ["--a", "$A"]),
        ("A=1\n[ x ] && A=2 && [ y ] || python a.py --a $A", ["--a", "$A"]),
        ("A=1\n(A=2; B=3)\npython a.py --a $A$B", ["--a", "1$B"]),
        ("(A=2; case x in a) python a.py --a $A ;; esac)", ["--a", "2"]),
        ("(A=2; case x in a) y ;; esac)\npython a.py --a ${A:-4}", ["--a", "4"]),
        ("(if x; then A=1; fi)\npython a.py --a ${A:-4}", ["--a", "4"]),
        ("A=1\nif x; then while y; do A=2; done; else z; fi\npython a.py --a $A", ["--a", "$A"]),
        ("A=4\nwhile x; do y; done\npython a.py --a $A; A=5", ["--a", "4"]),
        ("A+=5\npython a.py --a $A", ["--a", "5"]),
    ],
)  # fmt: skip
def test_what_a_condition_sets_is_not_known_behind_it(text, expected):
    found = [line for line in read_text_lines(text) if "a.py" in line.words]
    assert [list(line.words[-2:]) for line in found] == [expected]
    assert all(line.environment.get("A") in (None, expected[1][:1]) for line in found)


@pytest.mark.parametrize(
    "changes",
    ["((A++))", "(( A += 4 ))", "((--A))", "((B = 1, A <<= 2))", "((A++)) || true", "let A++",
     'let "A = A * 2"', "read A", "IFS=, read -r -p 'how many? ' B A <<< $x", "mapfile -t A < file",
     "if ((A++ > 3)); then B=1; fi", "while read A; do B=1; done < file", "unset A",
     "printf -v A %d 7"],
)  # fmt: skip
def test_what_a_command_of_the_shell_changes_is_no_longer_known(changes):
    found = read_text_lines(f"export A=4\n{changes}\npython a.py --a $A")[-1]
    assert (found.words, found.environment.get("A")) == (("python", "a.py", "--a", "$A"), None)


@pytest.mark.parametrize(
    "keeps", ["((A == 3))", "(( B = A < 3 ))", "let B=A", "read B", "(read A)", "echo read A"]
)
def test_what_a_command_of_the_shell_only_reads_stays_known(keeps):
    found = read_text_lines(f"A=4\n{keeps}\npython a.py --a $A")[-1]
    assert found.words == ("python", "a.py", "--a", "4")


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        ("break", "1 1"),
        ("[ x ] && break", "1 2 3 $s"),
        ("if x; then break; fi", "1 2 3 $s"),
        ("for t in 4 5; do break 2; done", "1 1"),
        ("for t in 4 5; do break; done", "1 2 3 3"),
        ("for t in 4 5; do if x; then break 2; fi; done", "1 2 3 $s"),
        ("while x; do break; done", "1 2 3 3"),
    ],
)
def test_a_loop_may_be_left_before_its_last_value(leaves, expected):
    text = f"for s in 1 2 3; do python a.py --seed $s; {leaves}; done\npython a.py --seed $s"
    found = [line[-1] for line in words(text) if "a.py" in line]
    assert " ".join(found) == expected


@pytest.mark.parametrize("end", ["\n", " "])
def test_a_pattern_of_a_case_may_be_in_brackets(end):
    branches = ["case $1 in", "(a) A=2 ;;", "(b|c) (cd x; python a.py --a $A);;", "esac"]
    found = words("A=1\n" + end.join(branches) + "\npython a.py --a ${A:-4}")
    assert [line for line in found if len(line) > 1] == [
        ["python", "a.py", "--a", "1"],
        ["python", "a.py", "--a", "${A:-4}"],
    ]


def test_a_condition_leaves_nothing_in_the_environment():
    line = read_text_lines("export A=1 B=2\nif x; then A=3; fi\npython a.py")[-1]
    assert line.environment == {"B": "2"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A=(--b 1 "x y")\npython a.py "${A[@]}" --c', ["--b", "1", "x y", "--c"]),
        ("A=(\n  --b 1 # one\n  --c\n)\nA+=(--d)\npython a.py ${A[*]}", ["--b", "1", "--c", "--d"]),
        ("declare -a A=(--b)\npython a.py ${A[@]} x", ["--b", "x"]),
        ("A=()\npython a.py --b ${A[@]}", ["--b"]),
        ('A=(1)\nwhile x; do python a.py "${A[@]}"; A+=(2); done', ["${A[@]}"]),
        ('A=(1)\nif x; then A+=(2); fi\npython a.py "${A[@]}"', ["${A[@]}"]),
        ('python a.py "${A[@]}"', ["${A[@]}"]),
    ],
)
def test_arrays_are_filled_in(text, expected):
    (line,) = [line for line in read_text_lines(text) if "a.py" in line.words]
    assert list(line.words[2:]) == expected


def test_errors_can_go_down_a_pipe_too():
    (line,) = read_text_lines("python a.py |& tee log.txt")
    assert (line.words, line.left_out) == (("python", "a.py"), ("| tee log.txt",))


@pytest.mark.parametrize("word", ["if", "until", "while", "elif", "if !"])
def test_a_condition_may_be_an_old_command(word):
    line = read_text_lines(f"{word} python train.py --a 1; then echo; fi")[0]
    assert is_old_command(line.words)
    assert read_old_command(line.words, {}).words == ("--a", "1")
