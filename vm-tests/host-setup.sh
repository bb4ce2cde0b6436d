# Sourced by .ci/run and by test, demo and bench in vm-tests: sees to it that this machine has
# what the lab needs. Everything after that is Rust.

say() { printf '%s\n' "$*" >&2; }

# What is built and run on the host; the guest's own packages are the lab's.
packages=(
    binutils
    ca-certificates
    gcc
    gzip
    kmod
    libc6-dev
    libudev-dev
    pkg-config
    qemu-system-x86
    util-linux
    xz-utils
    zstd
)

# The oldest cargo that builds the workspace, from its own Cargo.toml.
wanted_cargo=$(sed -n 's/^rust-version = "\([0-9.]*\)"$/\1/p' "$repo/Cargo.toml")

cargo_is_new_enough() {
    local version
    version=$(cargo --version 2>/dev/null | cut -d' ' -f2) || return 1
    [ -n "$version" ] && printf '%s\n%s\n' "$wanted_cargo" "$version" | sort -C -V
}

is_installed() {
    dpkg-query --show --showformat='${db:Status-Status}\n' "$1" 2>/dev/null |
        grep --quiet --line-regexp installed
}

# apt shows its progress on a terminal; elsewhere its words come when it fails.
apt_get() {
    # A machine that has just booted may be upgrading itself.
    local command=(apt-get -o DPkg::Lock::Timeout=300 "$@") log status=0
    if [ -t 2 ]; then
        DEBIAN_FRONTEND=noninteractive "${command[@]}" </dev/null >&2
        return
    fi
    log=$(mktemp)
    DEBIAN_FRONTEND=noninteractive "${command[@]}" </dev/null >"$log" 2>&1 || status=$?
    [ $status = 0 ] || cat "$log" >&2
    rm -f "$log"
    return $status
}

# Installs what the arguments name, or tells a user who may not how to do it.
install_packages() {
    local install=(install --yes --no-install-recommends "$@") run='Run as root:' sudo=
    if [ "$(id -u)" != 0 ]; then
        if command -v sudo >/dev/null; then
            run='Run:' sudo='sudo '
        fi
        say "This machine lacks packages that are needed here. $run"
        say "    ${sudo}apt-get update && ${sudo}apt-get ${install[*]}"
        exit 1
    fi
    say "installing $*"
    # Old lists name packages that are gone and a Rust that is too old; another
    # vendor's source that fails is no reason to stop.
    apt_get update || say "going on with the package lists that are there"
    if ! apt_get "${install[@]}"; then
        say "apt could not install $*: see above"
        exit 1
    fi
}

missing=()
for package in "${packages[@]}"; do
    is_installed "$package" || missing+=("$package")
done

cargo_packages=()
if ! cargo_is_new_enough; then
    if [ -x /usr/bin/cargo ] && PATH=/usr/bin:$PATH cargo_is_new_enough; then
        PATH=/usr/bin:$PATH
    else
        # Debian's builds of a current Rust for a stable release.
        cargo_packages=(cargo-web rustc-web)
    fi
fi

if [ $((${#missing[@]} + ${#cargo_packages[@]})) -gt 0 ]; then
    install_packages "${missing[@]}" "${cargo_packages[@]}"
    if [ ${#cargo_packages[@]} -gt 0 ]; then
        PATH=/usr/bin:$PATH
    fi
    if ! cargo_is_new_enough; then
        say "cargo $wanted_cargo or newer is needed; found: $(cargo --version 2>&1)"
        say "Debian's current one is in its -security suite: see that apt's sources name"
        say "that suite, or install Rust with rustup."
        exit 1
    fi
fi
export PATH
