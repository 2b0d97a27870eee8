// The kernels in a process of their own: for CPUs that an emulator runs, and for sanitizers.
// Reads calls from standard input, each with exactly the memory that its tensors have; writes that memory back (remote.py).
#include "attention.cpp"

#include <cstdio>
#include <cstdlib>
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {
void get(void* to, size_t n) {
  if (n && std::fread(to, 1, n, stdin) != n) std::exit(std::feof(stdin) ? 0 : 3);
}
int64_t number() {
  int64_t x;
  get(&x, sizeof(x));
  return x;
}
}  // namespace

int main() {
#ifdef __AMX_TILE__
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 4;  // ARCH_REQ_XCOMP_PERM: a process has to ask Linux for the tiles (library.py's does)
#endif
  constexpr int kPointers = 20;  // fields of Args that are addresses; they come first
  for (;;) {
    const int64_t function = number(), count = number();
    std::vector<std::unique_ptr<char, void (*)(void*)>> memory;
    std::vector<size_t> sizes;
    for (int64_t i = 0; i < count; i++) {
      sizes.push_back(size_t(number()));
      memory.emplace_back(static_cast<char*>(std::malloc(sizes.back())), std::free);
      get(memory.back().get(), sizes.back());
    }
    pa::Shape shape;
    get(&shape, sizeof(shape));
    int64_t place[kPointers][2];  // piece of memory, or -1 for null; offset
    get(place, sizeof(place));
    pa::Args args;
    for (int i = 0; i < kPointers; i++) {
      char* p = place[i][0] < 0 ? nullptr : memory[size_t(place[i][0])].get() + place[i][1];
      std::memcpy(reinterpret_cast<char*>(&args) + 8 * i, &p, 8);
    }
    get(reinterpret_cast<char*>(&args) + 8 * kPointers, sizeof(args) - 8 * kPointers);
    const int64_t code = function ? pa_cache_append(&shape, &args) : pa_attention(&shape, &args);
    std::fwrite(&code, sizeof(code), 1, stdout);
    for (size_t i = 0; i < memory.size(); i++) std::fwrite(memory[i].get(), 1, sizes[i], stdout);
    std::fflush(stdout);
  }
}
