// How a communicator is opened (comm/open.c, rendezvous.c, arena.c, segment.c): what is refused, what peers are told,
// what it costs. Also dc_comm_config's and dc_reducer_config's sizes.
#include "comm/bucket.h"
#include "ranks.h"

using namespace ranks;

namespace {

TEST(Sizes, OfAConfiguration) {
  const std::string address = fresh_address();
  dc_comm_config k = config_of(address.c_str(), 0, 1);
  dc_comm *c = nullptr;
  k.struct_size = 0;
  EXPECT_EQ(dc_comm_open(&k, &c), DC_E_INVALID);
  EXPECT_NE(nullptr, strstr(dc_last_error(), "dc_comm_config.struct_size is 0: set it to sizeof(dc_comm_config)"))
      << dc_last_error();
  k.struct_size = sizeof k + 8;
  EXPECT_EQ(dc_comm_open(&k, &c), DC_E_INVALID);
  EXPECT_NE(nullptr, strstr(dc_last_error(), "built for a newer one")) << dc_last_error();
  EXPECT_EQ(dc_comm_open(nullptr, &c), DC_E_INVALID);
  k.struct_size = sizeof k;
  ASSERT_EQ(dc_comm_open(&k, &c), DC_OK) << dc_last_error();
  dc_comm_close(c);

  dc_reducer_config r = {};
  dc_reducer *out = nullptr;
  EXPECT_EQ(dc_reducer_create(&r, &out), DC_E_INVALID);
  EXPECT_NE(nullptr, strstr(dc_last_error(), "dc_reducer_config.struct_size is 0")) << dc_last_error();
  r.struct_size = sizeof r + 1;
  EXPECT_EQ(dc_reducer_create(&r, &out), DC_E_INVALID);
  EXPECT_NE(nullptr, strstr(dc_last_error(), "built for a newer one")) << dc_last_error();
}

// What was compiled when the struct ended with `flags`. It lies in a block of just that size, which AddressSanitizer
// watches.
TEST(Sizes, AnOlderCallerIsTaken) {
  const std::string address = fresh_address();
  dc_comm_config k = config_of(address.c_str(), 0, 1);
  k.struct_size = offsetof(dc_comm_config, flags) + sizeof k.flags;
  std::vector<char> old((const char *)&k, (const char *)&k + k.struct_size);
  dc_comm *c = nullptr;
  ASSERT_EQ(dc_comm_open((const dc_comm_config *)old.data(), &c), DC_OK) << dc_last_error();
  dc_comm_close(c);
}

} // namespace
