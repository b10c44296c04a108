/* Included before every C file on x86-64 Linux (see CMakeLists.txt): asks glibc for the old versions of the few symbols
 * that it renumbered after 2.17, so that a library built on a new distribution loads on an old one. 2.29 made exp, log
 * and pow not set errno through the SVID wrapper (the results are the same code's); 2.34 moved libpthread and libdl
 * into libc. tests/python/test_wheel.py reads the libraries' version needs; scripts/manylinux.py names the wheel by
 * them. */
#if defined(__linux__) && defined(__x86_64__) && !defined(__ASSEMBLER__)
#include <features.h>
#ifdef __GLIBC__
#define DC__OLD(symbol) __asm__(".symver " #symbol ", " #symbol "@GLIBC_2.2.5")
DC__OLD(exp);
DC__OLD(log);
DC__OLD(pow);
DC__OLD(dladdr);
DC__OLD(dlclose);
DC__OLD(dlerror);
DC__OLD(dlopen);
DC__OLD(dlsym);
DC__OLD(pthread_create);
DC__OLD(pthread_join);
DC__OLD(pthread_mutex_trylock);
DC__OLD(pthread_once);
#undef DC__OLD
#endif
#endif
