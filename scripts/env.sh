# Sourced by the scripts beside it: makes .venv and installs the package, once.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bin="$root/.venv/bin"

say() { echo "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

find_python() {
  local name
  for name in python3.13 python3.12 python3.11 python3; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
}

make_venv() {
  local python
  python="$(find_python)"
  [[ -n $python ]] || fail "no Python 3.11 or newer was found; install one and run this again"
  "$python" -m venv --clear "$root/.venv" >&2 && return
  rm -rf "$root/.venv"
  fail "'$python -m venv' failed; install Python's venv module (Debian: apt install python3-venv)"
}

# install EXTRA: the package, editable, with one of pyproject's extras; dev contains blas.
# A stamp of what was asked for, and where, makes the next run quick.
install() {
  local extra=$1 wanted done
  wanted="$root $(cd "$root" && cksum pyproject.toml constraints.txt)"
  for done in "$extra" dev; do
    [[ -x $bin/python && "$(cat "$root/.venv/installed-$done" 2>/dev/null)" == "$wanted" ]] && return
  done
  "$bin/pip" --version >/dev/null 2>&1 || make_venv
  say "Installing into .venv; the first time takes a minute or two."
  "$bin/pip" install -qq --disable-pip-version-check \
    --constraint "$root/constraints.txt" --editable "${root}[$extra]" >&2
  echo "$wanted" >"$root/.venv/installed-$extra"
}
