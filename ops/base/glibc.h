/* Included before every C file on x86-64 Linux (see CMakeLists.txt): asks glibc for the old versions of the few symbols
 * that it renumbered after 2.17, so that a library built on a new distribution loads on an old one. 2.29 made exp, log,
 * log2 and pow not set errno through the SVID wrapper (the results are the same code's); 2.32 and 2.34 moved libpthread
 * and libdl into libc; the headers of 2.38 send strtol and scanf to forms that read "0b101" (C23), which nothing here
 * wants. tests/python/test_wheel.py reads the libraries' version needs; scripts/manylinux.py names the wheel by them.
 * Why so, and with what gain: docs/lab/old-glibc.md. */
#if defined(__linux__) && defined(__x86_64__) && !defined(__ASSEMBLER__)
#include <features.h>
#ifdef __GLIBC__
#define DC__OLD_AS(symbol, old, version) __asm__(".symver " #symbol ", " #old "@" #version)
#define DC__OLD(symbol) DC__OLD_AS(symbol, symbol, GLIBC_2.2.5)
DC__OLD(exp);
DC__OLD(log);
DC__OLD(log2);
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
DC__OLD(pthread_sigmask);
DC__OLD_AS(pthread_condattr_setclock, pthread_condattr_setclock, GLIBC_2.3.3);
DC__OLD_AS(__isoc23_strtol, strtol, GLIBC_2.2.5);
DC__OLD_AS(__isoc23_strtoll, strtoll, GLIBC_2.2.5);
DC__OLD_AS(__isoc23_strtoul, strtoul, GLIBC_2.2.5);
DC__OLD_AS(__isoc23_strtoull, strtoull, GLIBC_2.2.5);
DC__OLD_AS(__isoc23_sscanf, __isoc99_sscanf, GLIBC_2.7);
DC__OLD_AS(__isoc23_fscanf, __isoc99_fscanf, GLIBC_2.7);
#undef DC__OLD
#undef DC__OLD_AS
#endif
#endif
