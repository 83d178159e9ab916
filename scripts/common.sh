# Sourced by the other scripts: error messages, lists of packages, steps and their times.

set -euo pipefail
# Built files must be readable by all users, because programs of any user read an image's files.
umask 022
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/jiffy
target=${CARGO_TARGET_DIR:-$root/target}
dist=${DIST:-$root/dist}
# The triple is fixed in .cargo/config.toml: every binary is static.
triple=x86_64-unknown-linux-gnu
times=()

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# update_package_lists LOG: fetches apt's lists of packages, if permitted.
update_package_lists() {
    local as_root=()
    ((EUID == 0)) || as_root=(sudo -n)
    "${as_root[@]}" apt-get -q -o DPkg::Lock::Timeout=600 update >>"$1" 2>&1
}

# What jiffy-sched and its kernel are built with.
sched_packages=(clang pkg-config zlib1g-dev libelf-dev dwarves)

# Whether all these packages are installed.
are_installed() {
    local package status
    for package; do
        status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
        [[ $status == installed ]] || return 1
    done
}

# step NAME COMMAND…: prints the name, runs the command in a subshell (variables it sets are
# lost), records its time.
step() {
    local name=$1 begin=$SECONDS status
    shift
    echo "==> $name" >&2
    # `set -e` has no effect in a subshell that is tested with `||`.
    set +e
    (set -e; "$@")
    status=$?
    set -e
    times+=("$(printf '%5d s  %s' $((SECONDS - begin)) "$name")")
    ((status == 0)) || {
        summary
        fail "$name failed; see the messages above"
    }
}

# What both `make check` and `make test` check first.
static_checks() {
    step "format" cargo fmt --all --check
    step "lints" cargo clippy --workspace --all-targets --quiet -- -D warnings
    # Nothing else lints it with this feature: see its Cargo.toml.
    step "lints of jiffy-init" cargo clippy --profile small -p jiffy-guest \
        --features freestanding --quiet -- -D warnings
    # Broken links.
    step "documentation" env RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" \
        cargo doc --workspace --no-deps --document-private-items --quiet
    step "dependencies" scripts/cargo-deny --locked check licenses bans sources
}

summary() {
    ((${#times[@]} == 0)) || printf '%s\n' "${times[@]}" >&2
}
