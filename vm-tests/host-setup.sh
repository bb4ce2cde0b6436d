# Sourced by vm-tests/test and vm-tests/demo: sees to it that this machine has
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

missing=()
for package in "${packages[@]}"; do
    case $(dpkg-query --show --showformat='${db:Status-Status}\n' "$package" 2>/dev/null) in
    *installed*) ;;
    *) missing+=("$package") ;;
    esac
done

cargo_packages=()
if ! cargo_is_new_enough; then
    if [ -x /usr/bin/cargo ] && PATH=/usr/bin:$PATH cargo_is_new_enough; then
        PATH=/usr/bin:$PATH
    else
        # Debian's builds of a current Rust for a stable release.
        cargo_packages=(cargo-web rustc-web)
        missing+=("${cargo_packages[@]}")
    fi
fi

if [ ${#missing[@]} -gt 0 ]; then
    install="apt-get install --yes --no-install-recommends ${missing[*]}"
    if [ "$(id -u)" != 0 ]; then
        say "This machine lacks packages that the lab needs. Run:"
        say "    sudo apt-get update && sudo $install"
        exit 1
    fi
    say "installing ${missing[*]}"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    # The lists that are there may do, and a fresh image has none.
    if ! DEBIAN_FRONTEND=noninteractive $install >"$log" 2>&1; then
        say "fetching package lists"
        if ! { apt-get update && DEBIAN_FRONTEND=noninteractive $install; } >"$log" 2>&1; then
            cat "$log" >&2
            say "apt could not install ${missing[*]}: see above"
            exit 1
        fi
    fi
    rm -f "$log"
    if [ ${#cargo_packages[@]} -gt 0 ]; then
        PATH=/usr/bin:$PATH
    fi
    if ! cargo_is_new_enough; then
        say "cargo $wanted_cargo or newer is needed; found: $(cargo --version 2>&1)"
        exit 1
    fi
fi
export PATH
